"""The split-KV attention kernels against plain PyTorch: in the interpreter on a CPU, compiled on a GPU."""

import json
import os
import random
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl

from qwen38_3090.kernels import split_kv_attention as module
from qwen38_3090.kernels.split_kv_attention import (
    RTX_3090,
    Gpu,
    SplitKVScratch,
    plan_launch,
    split_kv_attention,
    split_kv_attention_reference,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.float16 if torch.cuda.is_available() else torch.float32
SMALL = {"heads": 4, "kv_heads": 2, "head_size": 64}
GROUP_OF_6 = {"heads": 12, "kv_heads": 2, "head_size": 256}  # half of the model's heads
TINY = Gpu(multiprocessors=4, shared_memory=100 << 10)  # few programs: the interpreter runs them one by one
# Error of one result, in units of its size plus the reference's root mean square. Against int8, q has 15 bits.
TOLERANCE = {torch.float32: 5e-5, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}
INT8_TOLERANCE = 3e-3
UNTOUCHED = 7.0


class Batch:
    """Queries and a paged cache, K and V of a slot side by side as vLLM stores them; NaN where no token was written."""

    def __init__(self, queries, contexts, *, heads, kv_heads, head_size, page=16, dtype=DTYPE, int8=False, padding=0):
        draw = torch.Generator().manual_seed(0)
        self.shape = {"heads": heads, "kv_heads": kv_heads, "head_size": head_size}
        self.queries, self.contexts = queries, contexts
        width = max(1, *(-(-context // page) for context in contexts))
        pages = width * len(queries) + 1
        row = kv_heads * 2 * (head_size + 4) if int8 else kv_heads * 2 * head_size
        table = (torch.randperm(pages - 1, generator=draw) + 1).view(len(queries), width).int()
        written = torch.zeros(pages, page, dtype=torch.bool)
        for pages_of, context in zip(table.long(), contexts, strict=True):
            position = torch.arange(context)
            written[pages_of[position // page], position % page] = True
        if int8:
            pool = torch.randint(-128, 128, (pages, page * row + padding), dtype=torch.int8, generator=draw).to(DEVICE)
            cache = pool[:, : page * row].view(pages, page, kv_heads, -1)
            self.k, self.v = cache.split(head_size + 4, -1)
            scales = [part.view(torch.float32)[..., head_size // 4] for part in (self.k, self.v)]
            for scale in scales:
                scale.copy_(torch.rand(scale.shape, generator=draw) * 0.03)
                scale[~written] = float("nan")
            self.scales = {"k_scale_cache": scales[0], "v_scale_cache": scales[1]}
        else:
            pool = torch.randn(pages, page * row + padding, generator=draw).to(DEVICE, dtype)
            cache = pool[:, : page * row].view(pages, page, kv_heads, -1)
            cache[~written] = float("nan")
            self.k, self.v = cache.split(head_size, -1)
            self.scales = {}
        self.table = table.to(DEVICE)
        # Queries four times as long as usual: some keys then weigh far more than others.
        self.q = torch.randn(sum(queries), heads, head_size, generator=draw).to(DEVICE, dtype) * 4
        starts = [sum(queries[:n]) for n in range(len(queries) + 1)]
        self.starts = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
        self.seq_lens = torch.tensor(contexts, dtype=torch.int32, device=DEVICE)

    def scratch(self, gpu=None):
        gpu = gpu or (None if DEVICE == "cuda" else TINY)
        return SplitKVScratch(
            DEVICE, **self.shape, max_requests=len(self.queries), max_q_len=max(self.queries), gpu=gpu
        )

    def arguments(self, **options):
        return {
            "cu_seqlens_q": self.starts,
            "seqused_k": self.seq_lens,
            "block_table": self.table,
            "softmax_scale": self.shape["head_size"] ** -0.5,
            **self.scales,
            **options,
        }

    def bounds(self):
        return {"max_seqlen_q": max(self.queries), "max_seqlen_k": max(1, *self.contexts)}

    def run(self, scratch=None, **options):
        out = torch.full_like(self.q, UNTOUCHED)
        arguments = self.arguments(**options) | self.bounds()
        return split_kv_attention(self.q, self.k, self.v, out, scratch=scratch or self.scratch(), **arguments)

    def check(self, scratch=None, **options):
        out = self.run(scratch, **options)
        self.compare(out, **options)

    def compare(self, out, **options):
        want = split_kv_attention_reference(self.q, self.k, self.v, **self.arguments(**options))
        live = torch.repeat_interleave(self.seq_lens > 0, self.starts.diff())
        assert (out[~live] == UNTOUCHED).all()
        assert want[live].abs().max() > 0.1
        error = ((out - want).abs() / (want[live].square().mean().sqrt() + want.abs()))[live].max()
        tolerance = max(TOLERANCE[out.dtype], INT8_TOLERANCE if self.scales else 0)
        assert error < tolerance, f"{error:.2e}"  # NaN fails too


def test_reference_is_softmax_attention():
    batch = Batch([3], [40], dtype=torch.float32, **SMALL)
    got = split_kv_attention_reference(batch.q, batch.k, batch.v, **batch.arguments())
    rows = torch.arange(40, device=DEVICE)
    k = batch.k[batch.table[0].long()[rows // 16], rows % 16].transpose(0, 1)
    v = batch.v[batch.table[0].long()[rows // 16], rows % 16].transpose(0, 1)
    mask = rows <= torch.arange(37, 40, device=DEVICE)[:, None]
    want = torch.nn.functional.scaled_dot_product_attention(
        batch.q.transpose(0, 1), k, v, attn_mask=mask, enable_gqa=True
    )
    torch.testing.assert_close(got, want.transpose(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("page", [16, 400, 432, 448, 864])
def test_page_sizes(page, int8):
    """Tiles straddle pages that are no power of two."""
    Batch([5], [page + 70], page=page, int8=int8, padding=64, **SMALL).check()


@pytest.mark.parametrize("queries", [1, 2, 5, 8, 16, 21, 22])
def test_query_lengths(queries):
    Batch([queries], [70], page=48, **GROUP_OF_6).check()


@pytest.mark.parametrize("int8", [False, True])
def test_ragged_batch(int8):
    """Requests with many, one and no query tokens; padding rows without context are left alone."""
    Batch([8, 0, 1, 3, 2, 0], [200, 0, 65, 3, 0, 90], int8=int8, **SMALL).check()


@pytest.mark.parametrize("context", [5, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257])
def test_context_around_tile_edges(context):
    Batch([5], [context], page=48, **SMALL).check()


@pytest.mark.parametrize("multiprocessors", [1, 2, 3, 7, 64])
def test_any_number_of_segments(multiprocessors, monkeypatch):
    """More than the merge takes at a time included."""
    monkeypatch.setattr(module, "MERGE_CHUNK", 2)
    batch = Batch([4, 1, 6], [300, 20, 130], **SMALL)
    batch.check(batch.scratch(Gpu(multiprocessors, 100 << 10)))


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(
    "options", [{"causal": True, "window_size": (40, 0)}, {"causal": False, "window_size": (40, 40)}, {"causal": False}]
)
def test_windows(options, int8):
    Batch([8, 1, 5], [200, 90, 20], int8=int8, heads=8, kv_heads=2, head_size=128).check(**options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("int8", [False, True])
def test_half_precision(dtype, int8):
    Batch([8, 1], [150, 40], dtype=dtype, int8=int8, page=48, **GROUP_OF_6).check()


def test_lengths_beyond_the_sequence_see_no_key():
    """Query positions before the first key (a length that is still a dummy) give zeros, not NaN."""
    batch = Batch([4], [2], **SMALL)
    assert (batch.run()[:2] == 0).all()
    assert batch.run().isfinite().all()


@triton.jit
def _deal(query_start, seq_lens, counts, quota, requests, segments, REQUESTS: tl.constexpr):
    n, each = module._deal(query_start, seq_lens, requests, segments, -1, 32, 2, REQUESTS)
    tl.store(counts + tl.arange(0, REQUESTS), n)
    tl.store(quota, each)


def test_every_tile_is_dealt_out_once():
    """However the lengths fall, the runs cover all tiles and fit the slots that the host reserved."""
    draw = random.Random(0)
    for _ in range(200):
        requests, segments = draw.choice([1, 2, 3, 8]), draw.randint(1, 70)
        seq_lens = [draw.choice([0, 1, 32, 33, draw.randint(1, 5000)]) for _ in range(requests)]
        counts = torch.zeros(8, dtype=torch.int32, device=DEVICE)
        quota = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        starts = torch.arange(requests + 1, dtype=torch.int32, device=DEVICE)
        _deal[(1,)](
            starts, torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE), counts, quota, requests, segments, 8
        )
        counts, quota = counts.tolist(), quota.item()
        assert counts[:requests] == [triton.cdiv(triton.cdiv(length, 32), quota) for length in seq_lens]
        assert sum(counts) <= segments + requests - 1
        assert quota >= 2


BF16 = {"heads": 24, "kv_heads": 4, "head_size": 256, "quantized": False}


def test_launch_fills_the_gpu_once():
    launch = plan_launch(8, 5, 100_000, **BF16, gpu=RTX_3090)
    assert launch.segments == 82 // 4 and launch.slots == launch.segments + 7
    twice = plan_launch(8, 5, 100_000, **BF16, gpu=Gpu(82, 228 << 10))
    assert twice.segments == 2 * 82 // 4
    short = plan_launch(1, 5, 128, **BF16, gpu=RTX_3090)
    assert short.segments == 128 // (short.tiling.keys * module.QUOTA)


@pytest.mark.parametrize(("queries", "rows", "tiles"), [(1, 16, 1), (5, 32, 1), (8, 48, 1), (16, 48, 2), (22, 48, 3)])
def test_tiles_hold_few_padding_rows(queries, rows, tiles):
    """6 query heads a KV head on the RTX 3090, where padding rows cost arithmetic that the card lacks."""
    launch = plan_launch(1, queries, 100_000, **BF16, gpu=RTX_3090)
    assert (launch.tiling.block, launch.q_tiles) == (rows, tiles)


@pytest.mark.parametrize(("queries", "rows"), [(5, 32), (8, 64), (16, 128), (21, 128)])
def test_one_wide_tile_where_shared_memory_allows(queries, rows):
    launch = plan_launch(1, queries, 100_000, **BF16, gpu=Gpu(132, 228 << 10))
    assert (launch.tiling.block, launch.q_tiles) == (rows, 1)


def test_scratch_for_the_rtx_3090_is_small():
    rows = SplitKVScratch.rows_for(24, 4, 256, max_requests=8, max_q_len=16, gpu=RTX_3090)
    assert rows * 257 * 4 < 24 << 20


def test_scratch_stays_where_it_is():
    batch = Batch([5, 5], [200, 40], **SMALL)
    scratch = batch.scratch()
    before = scratch.partial.data_ptr(), scratch.lse.data_ptr(), scratch.nbytes
    batch.check(scratch)
    Batch([2], [30], **SMALL).check(scratch)
    assert (scratch.partial.data_ptr(), scratch.lse.data_ptr(), scratch.nbytes) == before
    assert scratch.nbytes == scratch.rows * (SMALL["head_size"] + 1) * 4


def test_too_small_scratch_is_refused():
    batch = Batch([22] * 3, [200] * 3, **SMALL)
    with pytest.raises(ValueError, match="too small"):
        batch.run(Batch([1], [200], **SMALL).scratch(Gpu(1, 100 << 10)))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("block_table", lambda t: t.long()),
        ("seqused_k", lambda t: t[:-1]),
        ("cu_seqlens_q", lambda t: t.long()),
        ("q", lambda t: t.double()),
        ("q", lambda t: t[..., :48]),
        ("k", lambda t: t.half()),
        ("v", lambda t: t.contiguous()),
        ("k_scale_cache", lambda _: torch.ones(1)),
    ],
)
def test_unfit_arguments_are_refused(name, change):
    batch = Batch([5, 1], [40, 20], **SMALL)
    arguments = {"q": batch.q, "k": batch.k, "v": batch.v, **batch.arguments(), **batch.bounds()}
    arguments["scratch"] = batch.scratch()
    arguments[name] = change(arguments.get(name))
    with pytest.raises(ValueError):
        split_kv_attention(out=torch.empty_like(arguments["q"]), **arguments)


def test_shared_memory_of_compiled_tiles():
    """Compiles the largest tile of each kind, which needs no GPU: sm_86 gives a block 99 KiB, sm_90 227."""
    command = [sys.executable, "-m", "tests.kernels.shared_memory"]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout)
    assert len(found) == len(module.TILINGS) + len(module.WIDE_TILINGS)
    limit = {86: 99 << 10, 90: 227 << 10}
    for tile in found:
        assert 0 < tile["used"] <= tile["declared"] <= limit[tile["capability"]], tile


def test_every_tiling_of_the_rtx_3090_fits_it():
    assert all(tiling.shared <= 99 for tilings in module.TILINGS.values() for tiling in tilings)


@pytest.mark.gpu
@pytest.mark.parametrize("int8", [False, True])
def test_one_graph_serves_all_lengths(int8):
    """Captured at full bounds with dummy lengths, replayed with others; nothing is allocated."""
    batch = Batch([5, 5, 5, 5], [3000, 700, 33, 5], dtype=torch.bfloat16, int8=int8, page=432, **GROUP_OF_6)
    scratch, out = batch.scratch(), torch.empty_like(batch.q)
    arguments = {**batch.arguments(), **batch.bounds(), "scratch": scratch}
    lengths = batch.seq_lens.clone()
    batch.seq_lens.fill_(5)
    split_kv_attention(batch.q, batch.k, batch.v, out, **arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        before = torch.cuda.memory_allocated()
        split_kv_attention(batch.q, batch.k, batch.v, out, **arguments)
        assert torch.cuda.memory_allocated() == before
    for shift in (0, -1, -2, -5):
        batch.seq_lens.copy_((lengths + shift).clamp(min=0))
        out.fill_(UNTOUCHED)
        graph.replay()
        batch.compare(out)
