"""Top-k (at most 64), then top-p, without sorting the vocabulary.

What a row keeps, as vLLM's PyTorch code (`apply_top_k_top_p_pytorch`) defines it over the stably sorted row:

    top-k   every value >= the k-th largest, so ties at the k-th may keep more than k;
    top-p   of those, in ascending order of (value, index), all whose cumulative probability, themselves included, is
            above 1 - p in float32. Of equal values at the cut the lower indices go. The last one always stays.

The masks are identical, except where the cumulative probability comes within float32 rounding of 1 - p.

vLLM sorts all 248,320 logits of a row, or searches it from one program a row. Here the vocabulary is read once:

1. many programs a row store the maximum of each group of GROUP logits, and fill the output with what is not kept;
2. one program a row folds those maxima into COARSE > 64 of them. The k-th largest, `floor`, is a lower bound of the
   k-th largest logit, and only the groups that reach it, a few more than k, are read again (from the L2). Their logits
   from `floor` up, the candidates, are sorted; the survivors are written over the fill.

Rows with more than CAPACITY candidates (many ties, or the k largest logits side by side) take an exact path that reads
the row 34 times.
"""

import torch
import triton
import triton.language as tl

MAX_TOP_K = 64
GROUP = 128  # logits that share a maximum
COARSE = 128  # maxima that give the bound: at least MAX_TOP_K, more make fewer candidates
CAPACITY = 1024  # candidates a row
FEW = 128  # candidates that the common case sorts
READ_BLOCK = 4096
READ_WARPS = 8
SELECT_GROUPS = 32  # groups read at a time by the second kernel
SELECT_WARPS = 8

NEGATIVE_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def _load(source, inside):
    """Logits as float32; -inf outside and for NaN."""
    x = tl.load(source, mask=inside, other=NEGATIVE_INFINITY).to(tl.float32)
    return tl.where(x == x, x, NEGATIVE_INFINITY)


@triton.jit
def _truncates(k, MAX_K: tl.constexpr):
    return (k >= 1) & (k <= MAX_K)


@triton.jit
def _maxima_kernel(
    logits, logits_stride, ks, maxima, out, out_stride, vocabulary, groups, FILL: tl.constexpr, MAX_K: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    group = tl.program_id(0) * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = token < vocabulary
    x = tl.load(logits + row * logits_stride + token, mask=inside, other=NEGATIVE_INFINITY).to(tl.float32)
    fill = tl.where(_truncates(tl.load(ks + row), MAX_K), FILL, x)
    tl.store(out + row * out_stride + token, fill, mask=inside)
    highest = tl.max(tl.where(x == x, x, NEGATIVE_INFINITY), 1)
    tl.store(maxima + row * groups + group, highest, mask=group < groups)


@triton.jit
def _softmax_row(logits, out, vocabulary, BLOCK: tl.constexpr):
    """Softmax of one row by one program; zeros where all is -inf."""
    highest = tl.full((BLOCK,), NEGATIVE_INFINITY, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = _load(logits + token, token < vocabulary)
        higher = tl.maximum(highest, x)
        shift = tl.where(higher == NEGATIVE_INFINITY, 0.0, higher)
        total = total * tl.exp(highest - shift) + tl.exp(x - shift)
        highest = higher
    top = tl.max(highest)
    top = tl.where(top == NEGATIVE_INFINITY, 0.0, top)
    total = tl.sum(total * tl.exp(highest - top))
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        e = tl.exp(_load(logits + token, token < vocabulary) - top)
        tl.store(out + token, tl.where(total > 0, e / total, 0.0), mask=token < vocabulary)


@triton.jit
def _ordered(x):
    """float32 -> int64 in the same order, from 0 up; -0.0 as 0.0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _unordered(key):
    """The float32 of an `_ordered` key."""
    bits = (key - 2147483648).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _kth_of_row(logits, vocabulary, k, values, tokens, BLOCK: tl.constexpr):
    """The slow path: (k-th largest logit, how many equal it, how many are above), those above stored as candidates.

    Bisects the bits of the value with a pass over the row for each.
    """
    kth = tl.zeros((), tl.int64)
    for step in range(32):
        trial = kth | (tl.full((), 1, tl.int64) << (31 - step))
        reach = tl.zeros((), tl.int32)
        for start in range(0, vocabulary, BLOCK):
            token = start + tl.arange(0, BLOCK)
            key = _ordered(_load(logits + token, token < vocabulary))
            reach += tl.sum(((key >= trial) & (token < vocabulary)).to(tl.int32))
        kth = tl.where(reach >= k, trial, kth)
    ties = tl.zeros((), tl.int32)
    above = tl.zeros((), tl.int32)
    value = tl.full((), NEGATIVE_INFINITY, tl.float32)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = _load(logits + token, token < vocabulary)
        key = _ordered(x)
        tied = key == kth
        ties += tl.sum((tied & (token < vocabulary)).to(tl.int32))
        value = tl.maximum(value, tl.max(tl.where(tied, x, NEGATIVE_INFINITY)))
        hit = (key > kth) & (token < vocabulary)
        place = above + tl.cumsum(hit.to(tl.int32)) - 1
        tl.store(values + place, x, mask=hit)
        tl.store(tokens + place, token, mask=hit)
        above += tl.sum(hit.to(tl.int32))
    return value, ties, above


@triton.jit
def _truncate_candidates(
    values, tokens, count, top, k, cut, tie, ties, out, PROBABILITIES: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """Write the candidates, at most SIZE, that survive.

    `ties` further logits equal `tie`, survive top-k too and are smaller than all candidates. Returns how many of them
    top-p keeps, and the sum of exp(logit - `top`) over all that is kept.
    """
    at = tl.arange(0, SIZE)
    value = tl.load(values + at, mask=at < count, other=NEGATIVE_INFINITY)
    token = tl.load(tokens + at, mask=at < count, other=0)
    key = tl.sort(tl.where(at < count, (_ordered(value) << 31) | token, -1))
    token = (key & 0x7FFFFFFF).to(tl.int32)
    value = tl.where(key >= 0, _unordered(key >> 31), NEGATIVE_INFINITY)

    # Top-k. With fewer than k in the list, all survive: either there are no more, or the ties make up for it.
    kth = tl.max(tl.where(at == SIZE - k, value, NEGATIVE_INFINITY))
    survives = (key >= 0) & (value >= kth)
    weight = tl.where(survives, tl.exp(value - top), 0.0)
    tie_weight = tl.where(ties > 0, tl.exp(tie - top), 0.0)
    total = tl.sum(weight) + ties * tie_weight

    # Top-p. "Not at most": NaN, from infinite logits, drops nothing.
    cumulative = tl.cumsum(weight / total) + ties * tie_weight / total
    kept = survives & ((at == SIZE - 1) | ~(cumulative <= cut))
    kept_ties = ties
    if ties > 0:
        share = tie_weight / total
        dropped = tl.where(share > 0, cut / share, tl.where((share == 0) & (cut >= 0), float("inf"), 0.0))
        dropped = tl.minimum(tl.maximum(dropped, 0.0), ties - (count == 0).to(tl.float32))  # the largest of all stays
        kept_ties = ties - dropped.to(tl.int32)

    mass = tl.sum(tl.where(kept, weight, 0.0)) + kept_ties * tie_weight
    tl.store(out + token, weight / mass if PROBABILITIES else value, mask=kept)
    return kept_ties, mass


@triton.jit
def _select_kernel(
    logits, logits_stride, ks, ps, maxima, chosen_groups, values, tokens, out, out_stride, vocabulary, groups,
    MAX_K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, COARSE: tl.constexpr, WIDE: tl.constexpr,
    CAPACITY: tl.constexpr, FEW: tl.constexpr, BLOCK: tl.constexpr, PROBABILITIES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    k = tl.load(ks + row)
    logits += row * logits_stride
    out += row * out_stride
    if not _truncates(k, MAX_K):
        if PROBABILITIES:
            _softmax_row(logits, out, vocabulary, BLOCK)
        return

    maxima += row * groups
    chosen_groups += row * groups
    values += row * CAPACITY
    tokens += row * CAPACITY

    # A bound from below of the k-th largest logit: k of these maxima, so k logits, reach it.
    group = tl.arange(0, GROUPS)
    highest = tl.load(maxima + group, mask=group < groups, other=NEGATIVE_INFINITY)
    coarse = tl.sort(tl.max(tl.reshape(highest, (GROUPS // COARSE, COARSE)), 0))
    floor = tl.max(tl.where(tl.arange(0, COARSE) == COARSE - k, coarse, NEGATIVE_INFINITY))
    top = tl.max(coarse)

    chosen = (highest >= floor) & (highest > NEGATIVE_INFINITY)
    tl.store(chosen_groups + tl.cumsum(chosen.to(tl.int32)) - 1, group, mask=chosen)
    remaining = tl.sum(chosen.to(tl.int32))
    tl.debug_barrier()

    count = tl.zeros((), tl.int32)
    for start in range(0, remaining, WIDE):
        at = start + tl.arange(0, WIDE)
        chosen_group = tl.load(chosen_groups + at, mask=at < remaining, other=0)
        token = chosen_group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = _load(logits + token, (at < remaining)[:, None] & (token < vocabulary))
        hit = (x >= floor) & (x > NEGATIVE_INFINITY)
        in_group = tl.sum(hit.to(tl.int32), 1)
        place = (count + tl.cumsum(in_group) - in_group)[:, None] + tl.cumsum(hit.to(tl.int32), 1) - 1
        tl.store(values + place, x, mask=hit & (place < CAPACITY))
        tl.store(tokens + place, token, mask=hit & (place < CAPACITY))
        count += tl.sum(in_group)
    tl.debug_barrier()

    cut = tl.full((), -1.0, tl.float32)
    if ps is not None:
        cut = 1.0 - tl.load(ps + row)
    tie = tl.full((), NEGATIVE_INFINITY, tl.float32)
    ties = tl.zeros((), tl.int32)
    if count > CAPACITY:
        tie, ties, count = _kth_of_row(logits, vocabulary, k, values, tokens, BLOCK)
        tl.debug_barrier()
    if count <= FEW:
        ties_kept, mass = _truncate_candidates(
            values, tokens, count, top, k, cut, tie, ties, out, PROBABILITIES, FEW
        )  # fmt: skip
    else:
        ties_kept, mass = _truncate_candidates(
            values, tokens, count, top, k, cut, tie, ties, out, PROBABILITIES, CAPACITY
        )  # fmt: skip
    if ties_kept > 0:
        result = tl.exp(tie - top) / mass if PROBABILITIES else tie
        seen = tl.zeros((), tl.int32)
        for start in range(0, vocabulary, BLOCK):
            token = start + tl.arange(0, BLOCK)
            hit = _load(logits + token, token < vocabulary) == tie
            place = seen + tl.cumsum(hit.to(tl.int32)) - 1
            tl.store(out + token, tl.zeros((BLOCK,), tl.float32) + result, mask=hit & (place >= ties - ties_kept))
            seen += tl.sum(hit.to(tl.int32))


class TruncationScratch:
    """Intermediate results, allocated once: a captured CUDA graph holds their addresses.

    Serves calls of up to `max_rows` rows of `vocabulary` logits, one call at a time, in stream order.
    """

    def __init__(self, device: torch.device | str, max_rows: int, vocabulary: int):
        groups = triton.cdiv(vocabulary, GROUP)
        self.max_rows, self.vocabulary = max_rows, vocabulary
        self.maxima = torch.empty(max_rows, groups, dtype=torch.float32, device=device)
        self.chosen_groups = torch.empty(max_rows, groups, dtype=torch.int32, device=device)
        self.values = torch.empty(max_rows, CAPACITY, dtype=torch.float32, device=device)
        self.tokens = torch.empty(max_rows, CAPACITY, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        return self.maxima.nbytes + self.chosen_groups.nbytes + self.values.nbytes + self.tokens.nbytes


def truncate(
    logits: torch.Tensor,
    k: torch.Tensor,
    p: torch.Tensor | None,
    scratch: TruncationScratch,
    *,
    out: torch.Tensor | None = None,
    probabilities: bool = False,
) -> torch.Tensor:
    """Logits with -inf for what top-k and top-p drop, or the softmax of that.

    Args:
        logits: [rows, vocabulary], float32, float16 or bfloat16, rows contiguous; left as they are. NaN counts as -inf.
        k: int32 or int64 [rows]. A row whose k is not in 1..64 is not truncated at all (not by `p` either).
        p: float32 [rows], or None for no top-p.
        out: float32 [rows, vocabulary], rows contiguous, not overlapping `logits`; None: allocated.
        probabilities: return the softmax of the truncated rows; zeros for a row of -inf.

    Raises ValueError on unfit shapes, dtypes or strides, and when `scratch` is too small. Never synchronises.
    """
    rows, vocabulary = logits.shape
    if out is None:
        out = torch.empty(rows, vocabulary, dtype=torch.float32, device=logits.device)
    _check(logits, k, p, scratch, out)
    if rows == 0:
        return out
    groups = triton.cdiv(vocabulary, GROUP)
    _maxima_kernel[(triton.cdiv(vocabulary, READ_BLOCK), rows)](
        logits,
        logits.stride(0),
        k,
        scratch.maxima,
        out,
        out.stride(0),
        vocabulary,
        groups,
        FILL=0.0 if probabilities else float("-inf"),
        MAX_K=MAX_TOP_K,
        GROUP=GROUP,
        BLOCK=READ_BLOCK,
        num_warps=READ_WARPS,
    )
    _select_kernel[(rows,)](
        logits,
        logits.stride(0),
        k,
        p,
        scratch.maxima,
        scratch.chosen_groups,
        scratch.values,
        scratch.tokens,
        out,
        out.stride(0),
        vocabulary,
        groups,
        MAX_K=MAX_TOP_K,
        GROUP=GROUP,
        GROUPS=max(COARSE, triton.next_power_of_2(groups)),
        COARSE=COARSE,
        WIDE=SELECT_GROUPS,
        CAPACITY=CAPACITY,
        FEW=FEW,
        BLOCK=READ_BLOCK,
        PROBABILITIES=probabilities,
        num_warps=SELECT_WARPS,
    )
    return out


def _check(logits, k, p, scratch, out):
    rows, vocabulary = logits.shape
    if not logits.dtype.is_floating_point or logits.dtype.itemsize > 4 or logits.stride(1) != 1:
        raise ValueError("logits: float32, float16 or bfloat16 with contiguous rows")
    if out.shape != logits.shape or out.dtype != torch.float32 or out.stride(1) != 1:
        raise ValueError("out: float32, in the shape of the logits, with contiguous rows")
    if rows and out.data_ptr() == logits.data_ptr():
        raise ValueError("out must not be the logits: they are read again after it is filled")
    if k.shape != (rows,) or k.dtype not in (torch.int32, torch.int64) or not k.is_contiguous():
        raise ValueError(f"k: int32 or int64 [{rows}], contiguous")
    if p is not None and (p.shape != (rows,) or p.dtype != torch.float32 or not p.is_contiguous()):
        raise ValueError(f"p: float32 [{rows}], contiguous")
    if rows > scratch.max_rows or vocabulary != scratch.vocabulary:
        raise ValueError(f"scratch for {scratch.max_rows} rows of {scratch.vocabulary}: got {rows} of {vocabulary}")


def truncate_reference(logits: torch.Tensor, k: torch.Tensor, p: torch.Tensor | None) -> torch.Tensor:
    """What `truncate` returns without `probabilities`, by a stable sort. Logits float32, without NaN."""
    ascending, order = logits.sort(dim=-1, stable=True)
    truncated = (k >= 1) & (k <= MAX_TOP_K)
    kth = ascending.gather(1, (logits.shape[1] - k.long().where(truncated, 1).clamp(max=logits.shape[1]))[:, None])
    ascending = ascending.masked_fill(ascending < kth, -torch.inf)
    if p is not None:
        dropped = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - p[:, None]
        dropped[:, -1] = False
        ascending = ascending.masked_fill(dropped, -torch.inf)
    return torch.where(truncated[:, None], torch.empty_like(logits).scatter_(1, order, ascending), logits)


def undecided(logits: torch.Tensor, k: torch.Tensor, p: torch.Tensor | None, relative: float = 1e-6) -> torch.Tensor:
    """Where float32 can't tell a cumulative probability, here in float64, from 1 - p: both masks are right there."""
    if p is None:
        return torch.zeros_like(logits, dtype=torch.bool)
    ascending, order = truncate_reference(logits, k, None).sort(dim=-1, stable=True)
    cumulative = ascending.double().softmax(dim=-1).cumsum(dim=-1)
    cut = (1 - p).double()[:, None]
    near = (cumulative > 0) & ((cumulative - cut).abs() <= relative * cut + 1e-44)
    return torch.empty_like(near).scatter_(1, order, near)
