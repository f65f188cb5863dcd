"""Top-k, top-p and softmax over the vocabulary: ours beside PyTorch's operators and, where it is installed, vLLM's.

What works in place gets a fresh copy of the logits each time; "copy" says what that adds.
"""

import torch

from bench.timing import Bench, excess, rotation
from qwen38_3090.kernels.softmax import SoftmaxScratch, softmax, softmax_reference
from qwen38_3090.kernels.truncate import MAX_TOP_K, TruncationScratch, truncate, truncate_reference, undecided

VOCABULARY = 248320
ROWS = (1, 5, 8, 16, 64)
SORTED_ROWS = 16  # at most: sorting more takes milliseconds, and vLLM sorts fewer than 8
SETTINGS = ((20, 0.95), (64, 0.95))  # the model card's sampling, and the most that the kernel takes
TEMPERATURE = 0.7


def sort_based(logits: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """What vLLM runs below 8 rows, operator by operator; in place."""
    ascending, order = logits.sort(dim=-1)
    kth = ascending.gather(1, (logits.shape[1] - k.long())[:, None])
    ascending.masked_fill_(ascending < kth, -torch.inf)
    probabilities = ascending.softmax(dim=-1)
    dropped = torch.cumsum(probabilities, dim=-1, out=probabilities) <= 1 - p[:, None]
    dropped[:, -1] = False
    return logits.scatter_(1, order, ascending.masked_fill_(dropped, -torch.inf))


def stock():
    """vLLM's `apply_top_k_top_p`, or None where vLLM is not installed."""
    try:
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
    except ImportError:
        return None
    return apply_top_k_top_p


def same_mask(got: torch.Tensor, logits: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> float:
    """0 when `got` is the truncated logits, else the number of wrong places; see `undecided`."""
    return float(((got != truncate_reference(logits, k, p)) & ~undecided(logits, k, p)).sum())


def same_probabilities(got: torch.Tensor, logits: torch.Tensor, k: torch.Tensor, p: torch.Tensor) -> float:
    """Error of the truncated softmax, for rows of which `undecided` says that the mask is certain."""
    want = softmax_reference(truncate_reference(logits, k, p))
    certain = ~undecided(logits, k, p).any(dim=-1)
    return excess(got[certain], want[certain], 1e-8, 1e-5) if certain.any() else 0.0


def _truncation(bench: Bench, rows: int, top_k: int, top_p: float) -> None:
    nbytes = 2 * 4 * rows * VOCABULARY
    # Logits are bfloat16 before the temperature divides them, so they tie.
    logits = [
        torch.randn(rows, VOCABULARY, device="cuda").mul(3).bfloat16().float() / TEMPERATURE
        for _ in range(rotation(nbytes))
    ]
    outs = [torch.empty_like(source) for source in logits]
    k = torch.full((rows,), top_k, dtype=torch.int32, device="cuda")
    p = torch.full((rows,), top_p, dtype=torch.float32, device="cuda")
    truncation, shares = TruncationScratch("cuda", rows, VOCABULARY), SoftmaxScratch("cuda", rows, VOCABULARY)
    shape = {"rows": rows, "top_k": top_k, "top_p": top_p}

    def each(function):
        return [lambda source=source, out=out: function(source, out) for source, out in zip(logits, outs, strict=True)]

    def time(section, contestant, function, check):
        checked = range(0, len(logits), max(1, len(logits) // 4))

        def worst():
            return max(check(outs[i], logits[i], k, p) for i in checked)

        bench.time(section, shape, contestant, each(function), worst, nbytes)

    time("truncate", "ours", lambda x, out: truncate(x, k, p, truncation, out=out), same_mask)
    others = {"sort-based": sort_based} if rows <= SORTED_ROWS else {}
    if apply_top_k_top_p := stock():
        others["vLLM"] = apply_top_k_top_p
    for contestant, function in others.items():
        time("truncate", contestant, lambda x, out, function=function: function(out.copy_(x), k, p), same_mask)
    best = [None] * len(logits)

    def topk(x, out):
        best[0] = torch.topk(x, MAX_TOP_K, out=best[0]) if best[0] else torch.topk(x, MAX_TOP_K)

    bench.time(
        "truncate", shape, f"torch.topk({MAX_TOP_K}) alone", each(topk),
        lambda: float((best[0].values != logits[-1].sort(dim=-1, descending=True).values[:, :MAX_TOP_K]).sum()),
    )  # fmt: skip
    time("truncate", "copy", lambda x, out: out.copy_(x), lambda out, x, k, p: excess(out, x, 1e-9, 0))

    def fused(x, out):
        truncate(x, k, p, truncation, out=out, probabilities=True)

    def two_calls(x, out):
        softmax(truncate(x, k, p, truncation, out=out), shares, out=out)

    time("truncate + softmax", "ours", fused, same_probabilities)
    time("truncate + softmax", "ours, two calls", two_calls, same_probabilities)
    for contestant, function in others.items():
        time(
            "truncate + softmax",
            contestant,
            lambda x, out, function=function: torch.softmax(function(out.copy_(x), k, p), -1, out=out),
            same_probabilities,
        )


def _softmax(bench: Bench, rows: int) -> None:
    nbytes = 2 * 4 * rows * VOCABULARY
    logits = [torch.randn(rows, VOCABULARY, device="cuda").mul(3) for _ in range(rotation(nbytes))]
    outs = [torch.empty_like(source) for source in logits]
    scratch = SoftmaxScratch("cuda", rows, VOCABULARY)
    pairs = list(zip(logits, outs, strict=True))

    def check():
        return max(excess(out, softmax_reference(x), 1e-10, 1e-5) for x, out in pairs[:4])

    for contestant, function in (
        ("ours", lambda x, out: softmax(x, scratch, out=out)),
        ("torch.softmax", lambda x, out: torch.softmax(x, -1, out=out)),
    ):
        launches = [lambda x=x, out=out, function=function: function(x, out) for x, out in pairs]
        bench.time("softmax", {"rows": rows}, contestant, launches, check, nbytes)


def run(bench: Bench) -> None:
    for rows in ROWS:
        for setting in SETTINGS:
            _truncation(bench, rows, *setting)
        _softmax(bench, rows)
    columns = {}
    for row in bench.rows:
        if row["section"] in ("truncate", "truncate + softmax", "softmax"):
            line = (row["section"], row.get("top_k", ""), row["contestant"])
            columns.setdefault(line, {})[row["rows"]] = row.get("us", "WRONG")
    print(f"\nsampler, {VOCABULARY} logits a row, us for rows:" + "".join(f"{rows:>9}" for rows in ROWS))
    for (section, top_k, contestant), times in columns.items():
        label = f"{section} {f'k={top_k} ' if top_k else ''}{contestant}"
        print(f"{label:<50}" + "".join(f"{times.get(rows, ''):>9}" for rows in ROWS))
