"""The split-KV verify attention beside what vLLM 0.27.1 runs: FlashAttention 2 and 3, and its Triton kernel.

One request or a batch, random pages of one large pool; consecutive launches read different pages of it.
"""

import torch

from bench.timing import Bench, excess, rotation
from qwen38_3090.kernels.split_kv_attention import (
    Gpu,
    SplitKVScratch,
    split_kv_attention,
    split_kv_attention_reference,
)

DEVICE = "cuda"
TARGET = {"heads": 24, "kv_heads": 4, "head_size": 256}
DRAFTER = {"heads": 32, "kv_heads": 8, "head_size": 128, "window_size": (2047, 2047), "causal": False}

# (context of each request, query tokens of each request)
SINGLE = [(1536, 5), (4096, 8), (16384, 5), (16384, 16), (65536, 8), (131072, 16)]
BATCH = [((8192,) * 8, (5,) * 8), ((60000, 4000, 2000, 1000), (5, 5, 5, 5)), ((2048,) * 64, (5,) * 64)]


class Case:
    """Queries and a paged cache: `tables` hold as many sets of pages as it takes to keep the L2 cold."""

    def __init__(
        self,
        contexts,
        queries,
        *,
        heads,
        kv_heads,
        head_size,
        page=16,
        quantized=False,
        window_size=None,
        causal=True,
        rotate=True,
        padding=0,
        poison=False,
    ):
        self.quantized = quantized
        self.queries, self.contexts = queries, contexts
        self.heads, self.kv_heads, self.head_size = heads, kv_heads, head_size
        self.requests = len(contexts)
        width = max(-(-context // page) for context in contexts)
        span = sum(min(c, window_size[0] + q) if window_size else c for c, q in zip(contexts, queries, strict=True))
        self.kv_bytes = span * kv_heads * (2 * head_size + 8 if quantized else 4 * head_size)
        sets = rotation(self.kv_bytes) if rotate else 1
        pages = sets * self.requests * width + 1
        slot = 2 * (head_size + 4) if quantized else 2 * head_size
        dtype = torch.int8 if quantized else torch.bfloat16
        pool = torch.empty(pages, page * kv_heads * slot + padding, dtype=dtype, device=DEVICE)
        cache = pool[:, : page * kv_heads * slot].view(pages, page, kv_heads, slot)
        scales = {}
        if quantized:
            for start in range(0, pages, 4096):
                cache[start : start + 4096].random_(-127, 128)
            self.k, self.v = cache.split(head_size + 4, -1)
            for name, part in (("k_scale_cache", self.k), ("v_scale_cache", self.v)):
                scales[name] = part.view(torch.float32)[..., head_size // 4].uniform_(0.005, 0.02)
        else:
            cache.normal_()
            self.k, self.v = cache.split(head_size, -1)
        self.tables = (torch.randperm(pages - 1, device=DEVICE).int() + 1).view(sets, self.requests, width)
        if poison:
            self._poison(scales)
        starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()])
        tokens = int(starts[-1])
        self.q = torch.randn(tokens, heads, head_size, device=DEVICE).bfloat16() * 2
        self.out = torch.full_like(self.q, float("nan"))
        self.common = {
            "cu_seqlens_q": starts.int().to(DEVICE),
            "seqused_k": torch.tensor(contexts, dtype=torch.int32, device=DEVICE),
            "softmax_scale": head_size**-0.5,
            "causal": causal,
            "window_size": window_size,
            **scales,
        }
        self.bounds = {"max_seqlen_q": max(queries), "max_seqlen_k": max(contexts)}

    def _poison(self, scales):
        """NaN wherever no token was written."""
        free = torch.ones(self.k.shape[:2], dtype=torch.bool, device=DEVICE)
        for row, context in zip(self.tables[0].long(), self.contexts, strict=True):
            position = torch.arange(context, device=DEVICE)
            free[row[position // free.shape[1]], position % free.shape[1]] = False
        for scale in scales.values():
            scale.masked_fill_(free[..., None], float("nan"))
        if not scales:
            self.k.masked_fill_(free[..., None, None], float("nan"))
            self.v.masked_fill_(free[..., None, None], float("nan"))

    def ours(self, gpu: Gpu | None = None):
        scratch = SplitKVScratch(
            DEVICE,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_size=self.head_size,
            max_requests=self.requests,
            max_q_len=max(self.queries),
            gpu=gpu,
        )
        arguments = {**self.common, **self.bounds, "scratch": scratch}

        def launch(table):
            return lambda: split_kv_attention(self.q, self.k, self.v, self.out, block_table=table, **arguments)

        return [launch(table) for table in self.tables]

    def check(self) -> float:
        """Error of `out`, the result of the launch with the last table, against float32; then spoil it again."""
        if not hasattr(self, "want"):
            self.want = split_kv_attention_reference(
                self.q, self.k, self.v, block_table=self.tables[-1], **self.common
            )  # fmt: skip
        # bfloat16 weights: errors add up like the values they weigh.
        error = excess(self.out, self.want, atol=0.02 * self.want.square().mean().sqrt().item(), rtol=0.02)
        self.out.fill_(float("nan"))
        return error


def _flash(case: Case, version: int):
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    arguments = {**case.common, **case.bounds, "fa_version": version}
    arguments["window_size"] = list(arguments["window_size"]) if arguments["window_size"] else None

    def launch(table):
        return lambda: flash_attn_varlen_func(
            q=case.q, k=case.k, v=case.v, out=case.out, block_table=table, **arguments
        )  # fmt: skip

    return [launch(table) for table in case.tables]


def _unified(case: Case):
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import KVQuantMode

    ones = torch.ones(case.requests, case.kv_heads, device=DEVICE)
    arguments = {
        **case.common,
        **case.bounds,
        "window_size": case.common["window_size"] or (-1, -1),
        "softcap": 0,
        "q_descale": None,
        "k_descale": None if case.quantized else ones,
        "v_descale": None if case.quantized else ones,
        "kv_quant_mode": KVQuantMode.INT8_PER_TOKEN_HEAD if case.quantized else KVQuantMode.NONE,
    }

    def launch(table):
        return lambda: unified_attention(q=case.q, k=case.k, v=case.v, out=case.out, block_table=table, **arguments)

    return [launch(table) for table in case.tables]


def contestants(case: Case):
    yield "ours", case.ours()
    gpu = Gpu.of(DEVICE)
    if gpu.shared_memory >= 200 << 10 and not case.quantized and case.head_size == 256:
        # The tilings for 99 KB a block, on a GPU that has more.
        yield "ours, sm_86 tiles", case.ours(Gpu(gpu.multiprocessors, 199 << 10))
    try:
        import vllm  # noqa: F401
    except ImportError:
        return
    if not case.quantized:
        yield "FA2", _flash(case, 2)
        if torch.cuda.get_device_capability()[0] == 9:
            yield "FA3", _flash(case, 3)
    if case.common["causal"]:
        yield "vLLM Triton", _unified(case)


def random_cases(count: int, seed: int = 0, longest: int = 5000):
    """Small ragged batches over every option: page sizes, windows, quantization, rows without tokens or context."""
    draw = torch.Generator().manual_seed(seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (), generator=draw))]

    for _ in range(count):
        requests = pick(1, 2, 3, 8)
        queries = [pick(0, 1, 2, 5, 8, 16, 21, 22) for _ in range(requests)]
        contexts = [min(longest, pick(0, q, q + 1, 449, 1000, 1024, 5000)) if q else 0 for q in queries]
        if not any(contexts):
            continue
        shape = pick(TARGET, TARGET, DRAFTER, {**DRAFTER, "window_size": (63, 0), "causal": True})
        yield Case(
            contexts,
            queries,
            page=pick(16, 400, 432, 448, 864),
            quantized=pick(True, False),
            padding=pick(0, 1024),
            rotate=False,
            poison=True,
            **shape,
        )


def check_random(count: int = 12, gpu: Gpu | None = None, **options) -> float:
    """Largest error over random cases; rows of requests without context must stay as they were."""
    worst = 0.0
    for case in random_cases(count, **options):
        for launch in case.ours(gpu):
            launch()
        starts = case.common["cu_seqlens_q"].tolist()
        for request, context in enumerate(case.contexts):
            if context == 0:
                rows = case.out[starts[request] : starts[request + 1]]
                if not rows.isnan().all():
                    return float("inf")
                rows.zero_()
        worst = max(worst, case.check())
    return worst


def run(bench: Bench) -> None:
    worst = check_random()
    print(f"attention: largest error over random cases {worst:.2f} of the tolerance")
    if not worst <= 1:
        raise SystemExit("attention: wrong results; nothing timed")
    cases = [((context,), (q,), page, quantized, TARGET, "target")
             for context, q in SINGLE for page in (16, 864) for quantized in (False, True)]  # fmt: skip
    cases += [(*batch, 864, quantized, TARGET, "target") for batch in BATCH for quantized in (False, True)]
    cases += [((context,), (q,), 864, False, DRAFTER, "drafter") for context, q in ((16384, 8), (16384, 16))]
    for contexts, queries, page, quantized, shape, model in cases:
        case = Case(contexts, queries, page=page, quantized=quantized, **shape)
        row = {
            "model": model,
            "requests": case.requests,
            "context": max(contexts),
            "queries": max(queries),
            "page": page,
            "kv": "int8" if quantized else "bf16",
        }
        times = [
            (name, bench.time("attention", row, name, launches, case.check, case.kv_bytes))
            for name, launches in contestants(case)
        ]
        shown = "  ".join(f"{name} {us:8.1f}" if us else f"{name}    wrong" for name, us in times)
        rate = bench.rows[-len(times)].get("GB_s")
        print("  ".join(f"{value:>7}" for value in row.values()), f"  {shown}  {rate} GB/s")
        del case
