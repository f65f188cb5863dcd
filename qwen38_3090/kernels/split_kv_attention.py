"""Attention of a few query tokens over a long paged KV cache, with the KV sequence split over the GPU.

For query token i of a request, at position p = seq_len - q_len + i, and query head h of KV head g = h // (Hq / Hkv):

    out[i, h] = sum_j softmax_j(scale * <q[i, h], k[j, g]>) * v[j, g],    0 <= j < seq_len, p - left <= j <= p + right

A speculative verify step has 1 to 22 query tokens a request. FlashAttention 2 and vLLM's Triton kernel then give each
(request, head) one thread block that walks the whole context while most of the GPU idles. Here the KV tiles of the
whole batch are dealt out evenly (Flash-Decoding, https://pytorch.org/blog/flash-decoding), the query tokens and query
heads of a KV head share one read of it, and a second kernel merges the partial results in float32.

Lengths stay on the device: both grids depend on shapes and on the bound of the context alone, so a CUDA graph captured
once serves every length, and the scratch never moves.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

INTERPRETED = triton.knobs.runtime.interpret  # then every dot runs in float32: the interpreter's bfloat16 one is wrong

LOG2_E = 1.4426950408889634

# Four int8 codes in each of two words -> four pairs of float16. A code c, its sign bit flipped, in the low byte of
# 0x6400 reads as 1024 + c + 128, and 0x6480 is 1152: exact, and without the slow integer-to-float conversion.
UNPACK_INT8 = tl.constexpr("""{
    .reg .b32 a, b, c, d, bias;
    mov.b32 bias, 0x64806480;
    prmt.b32 a, $4, $5, 0x4400;
    prmt.b32 b, $4, $5, 0x5511;
    prmt.b32 c, $4, $5, 0x6622;
    prmt.b32 d, $4, $5, 0x7733;
    lop3.b32 a, a, 0x00ff00ff, bias, 0x6a;
    lop3.b32 b, b, 0x00ff00ff, bias, 0x6a;
    lop3.b32 c, c, 0x00ff00ff, bias, 0x6a;
    lop3.b32 d, d, 0x00ff00ff, bias, 0x6a;
    sub.f16x2 $0, a, bias;
    sub.f16x2 $1, b, bias;
    sub.f16x2 $2, c, bias;
    sub.f16x2 $3, d, bias;
}""")


@triton.jit
def _dot(a, b, FLOAT32: tl.constexpr):
    if FLOAT32:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b)


@triton.jit
def _dot_int8(a, b, FLOAT32: tl.constexpr):
    if FLOAT32:  # exact: at most 127 * 128 * 256 < 2^24
        return _dot(a, b, True).to(tl.int32)
    else:
        return tl.dot(a, b)


@triton.jit
def _unpack_int8(words, FLOAT32: tl.constexpr):
    """int32 [n, w], each four int8 codes (low byte first) -> four [n, w] of the compute type."""
    if FLOAT32:
        return (
            ((words << 24) >> 24).to(tl.float32),
            ((words << 16) >> 24).to(tl.float32),
            ((words << 8) >> 24).to(tl.float32),
            (words >> 24).to(tl.float32),
        )
    else:
        return tl.inline_asm_elementwise(
            UNPACK_INT8, "=r,=r,=r,=r,r,r", [words], (tl.float16, tl.float16, tl.float16, tl.float16), True, 2
        )


@triton.jit
def _deal(
    query_start, seq_lens, requests, segments, LEFT: tl.constexpr, KEYS: tl.constexpr, QUOTA: tl.constexpr,
    REQUESTS: tl.constexpr,
):  # fmt: skip
    """Deal the tiles of the batch out: (segments of each request [REQUESTS], tiles a segment)."""
    row = tl.arange(0, REQUESTS)
    inside = row < requests
    q_len = tl.load(query_start + row + 1, mask=inside, other=0) - tl.load(query_start + row, mask=inside, other=0)
    seq_len = tl.where(q_len > 0, tl.load(seq_lens + row, mask=inside, other=0), 0)
    tiles = (seq_len + KEYS - 1) // KEYS
    if LEFT >= 0:
        tiles -= tl.maximum(seq_len - q_len - LEFT, 0) // KEYS
    quota = tl.maximum((tl.sum(tiles) + segments - 1) // segments, QUOTA)
    return (tiles + quota - 1) // quota, quota


@triton.jit
def _load_queries(
    query, start, rows, head, count, scale, stride_token, stride_head, GROUP: tl.constexpr, HEAD: tl.constexpr,
    PARTS: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """The packed queries of `rows` (token * GROUP + head in the group), and the factor of their scores.

    As PARTS tiles of neighbouring dimensions; or, against int8 keys, as two tiles of int8, q = (128 high + low) * unit.
    """
    token = (start + rows // GROUP).to(tl.int64)
    at = (query + token * stride_token + (head * GROUP + rows % GROUP) * stride_head)[:, None]
    inside = (rows < count)[:, None]
    if QUANTIZED:
        q = tl.load(at + tl.arange(0, HEAD)[None, :], mask=inside, other=0.0).to(tl.float32)
        # Fifteen bits of the row's largest value: finer than the weights' rounding to float16.
        unit = tl.maximum(tl.max(tl.abs(q), 1), 1e-30)[:, None] / (127 * 128)
        codes = tl.floor(q / unit + 0.5).to(tl.int32)
        high = (codes + 64) >> 7
        return (high.to(tl.int8), (codes - high * 128).to(tl.int8)), unit * scale
    else:
        dims = tl.arange(0, HEAD // PARTS)[None, :]
        parts = ()
        for part in tl.static_range(PARTS):
            parts = parts + (tl.load(at + dims + part * (HEAD // PARTS), mask=inside, other=0.0),)  # noqa: RUF005
        return parts, scale


@triton.jit
def _span(rows, seq_len, context, GROUP: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """First and last key position that each packed row attends to: two [rows, 1]."""
    position = context + rows // GROUP
    first = tl.zeros_like(position)
    last = tl.zeros_like(position) + seq_len - 1
    if LEFT >= 0:
        first = position - LEFT
    if RIGHT >= 0:
        last = tl.minimum(last, position + RIGHT)
    return first[:, None], last[:, None]


@triton.jit
def _pages(table, start, seq_len, PAGE: tl.constexpr, KEYS: tl.constexpr, RUN: tl.constexpr):
    """Pages of the tile at position `start`, one for each RUN of positions; 0, a valid page, beyond the sequence."""
    pages = ()
    for run in tl.static_range(KEYS // RUN):
        position = (start + run * RUN).to(tl.uint32)
        pages = pages + (tl.load(table + position // PAGE, mask=position < seq_len, other=0),)  # noqa: RUF005
    return pages


@triton.jit
def _offsets(pages, start, stride_page, stride_slot, PAGE: tl.constexpr, KEYS: tl.constexpr, RUN: tl.constexpr):
    """Where the positions of a tile lie in the cache, in elements: int64 [KEYS]. No RUN straddles a page."""
    key = tl.arange(0, KEYS)
    base = tl.zeros((KEYS,), tl.int64)
    for run in tl.static_range(KEYS // RUN):
        slot = (start + run * RUN).to(tl.uint32) % PAGE
        at = pages[run].to(tl.int64) * stride_page + slot.to(tl.int64) * stride_slot
        base = tl.where(key // RUN == run, at, base) if run > 0 else base + at
    return base + key % RUN * stride_slot


@triton.jit
def _scores(q, factor, k, k_scale, FLOAT32: tl.constexpr, QUANTIZED: tl.constexpr):
    """factor * k_scale * <q, k>: [rows, keys], in two chains of dots that do not wait for each other."""
    if QUANTIZED:
        keys = tl.trans(k[0])
        return (_dot_int8(q[0], keys, FLOAT32) * 128 + _dot_int8(q[1], keys, FLOAT32)).to(tl.float32) * factor * k_scale
    elif len(q) == 1:
        return _dot(q[0], tl.trans(k[0]), FLOAT32) * factor
    else:
        half: tl.constexpr = len(q) // 2
        first = _dot(q[0], tl.trans(k[0]), FLOAT32)
        second = _dot(q[half], tl.trans(k[half]), FLOAT32)
        for part in tl.static_range(1, half):
            first += _dot(q[part], tl.trans(k[part]), FLOAT32)
            second += _dot(q[half + part], tl.trans(k[half + part]), FLOAT32)
        return first * factor + second * factor  # a plain sum would be compiled into one chain


@triton.jit
def _attend(
    state, scores, v, v_scale, positions, span, FLOAT32: tl.constexpr, QUANTIZED: tl.constexpr, LEFT: tl.constexpr
):
    """One step of the online softmax in base 2. `state`: maximum [rows], weights [rows, keys], accumulators.

    The weights are summed over the tiles only; over the keys, across the warps, once at the end (`_store`).
    """
    highest, total, sums = state
    allowed = positions <= span[1]
    if LEFT >= 0:
        allowed &= positions >= span[0]
    scores = tl.where(allowed, scores, float("-inf"))
    new = tl.maximum(highest, tl.max(scores, 1))
    # A row without any allowed key so far stays at -inf; subtracting that from itself would be NaN.
    base = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp2(scores - base[:, None])
    decay = tl.exp2(highest - base)[:, None]
    total = total * decay + weights
    if QUANTIZED:
        weights *= v_scale
    weights = weights.to(v[0].dtype)
    new_sums = ()
    for part in tl.static_range(len(v)):
        new_sums = new_sums + (sums[part] * decay + _dot(weights, v[part], FLOAT32),)  # noqa: RUF005
    return new, total, new_sums


@triton.jit
def _start(ROWS: tl.constexpr, KEYS: tl.constexpr, HEAD: tl.constexpr, PARTS: tl.constexpr):
    sums = ()
    for _ in tl.static_range(PARTS):
        sums = sums + (tl.zeros((ROWS, HEAD // PARTS), tl.float32),)  # noqa: RUF005
    return tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS, KEYS), tl.float32), sums


@triton.jit
def _store(state, partial, partial_lse, at, HEAD: tl.constexpr, PARTS: tl.constexpr):
    highest, total, sums = state
    total = tl.sum(total, 1)
    seen = total > 0  # else the row saw no key here
    total = tl.where(seen, total, 1.0)
    tl.store(partial_lse + at, tl.where(seen, highest + tl.log2(total), float("-inf")))
    base = partial + at.to(tl.int64)[:, None] * HEAD + tl.arange(0, HEAD // PARTS)[None, :]
    for part in tl.static_range(PARTS):
        tl.store(base + part * (HEAD // PARTS), sums[part] / total[:, None])


@triton.jit(do_not_specialize=["requests", "segments", "stride_table"])
def _segment_kernel(
    query, key, value, key_scale, value_scale, block_table, query_start, seq_lens, partial, partial_lse,
    scale, requests, segments,
    stride_q_token, stride_q_head, stride_page, stride_slot, stride_head, stride_table,
    GROUP: tl.constexpr, HEAD: tl.constexpr, PAGE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    QUANTIZED: tl.constexpr, FLOAT32: tl.constexpr, REQUESTS: tl.constexpr, QUOTA: tl.constexpr,
    ROWS: tl.constexpr, TAIL: tl.constexpr, KEYS: tl.constexpr, RUN: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Program (query tile, KV head, slot): a run of KV tiles of one request against one tile of its packed rows."""
    q_tile, head, slot = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    counts, quota = _deal(query_start, seq_lens, requests, segments, LEFT, KEYS, QUOTA, REQUESTS)
    request = tl.sum((tl.cumsum(counts, 0) <= slot).to(tl.int32))
    if request >= requests:
        return
    segment = slot - tl.sum(tl.where(tl.arange(0, REQUESTS) < request, counts, 0))
    q_start = tl.load(query_start + request)
    q_len = tl.load(query_start + request + 1) - q_start
    seq_len = tl.load(seq_lens + request)
    context = seq_len - q_len
    count = q_len * GROUP
    row = q_tile * (ROWS + TAIL)
    if row >= count:
        return
    first = segment * quota
    if LEFT >= 0:
        first += tl.maximum(context - LEFT, 0) // KEYS
    last = tl.minimum(first + quota, (seq_len + KEYS - 1) // KEYS)

    rows = row + tl.arange(0, ROWS)
    q, factor = _load_queries(
        query, q_start, rows, head, count, scale, stride_q_token, stride_q_head, GROUP, HEAD, PARTS, QUANTIZED
    )  # fmt: skip
    span = _span(rows, seq_len, context, GROUP, LEFT, RIGHT)
    state = _start(ROWS, KEYS, HEAD, PARTS)
    if TAIL:
        tail_rows = row + ROWS + tl.arange(0, TAIL)
        tail_q, tail_factor = _load_queries(
            query, q_start, tail_rows, head, count, scale, stride_q_token, stride_q_head, GROUP, HEAD, PARTS, QUANTIZED
        )  # fmt: skip
        tail_span = _span(tail_rows, seq_len, context, GROUP, LEFT, RIGHT)
        tail_state = _start(TAIL, KEYS, HEAD, PARTS)

    head_at = head.to(tl.int64) * stride_head
    dims = tl.arange(0, HEAD // PARTS)[None, :]
    if QUANTIZED:  # strides count the 32-bit words of the values; the keys are read as bytes
        key = key.to(tl.pointer_type(tl.int8)) + head_at * 4 + tl.arange(0, HEAD)[None, :]
    else:
        key = key + head_at + dims
    value = value + head_at + dims
    table = block_table + request.to(tl.int64) * stride_table
    pages = _pages(table, first * KEYS, seq_len, PAGE, KEYS, RUN)
    for step in tl.range(last - first, num_stages=STAGES):
        start = (first + step) * KEYS
        positions = start + tl.arange(0, KEYS)
        inside = positions < seq_len
        at = _offsets(pages, start, stride_page, stride_slot, PAGE, KEYS, RUN)
        if QUANTIZED:
            k = (tl.load(tl.multiple_of(key + at[:, None] * 4, (1, 8))),)
            k_scale = tl.load(key_scale + head_at + at)[None, :]
            # Codes of unwritten slots are finite whatever they are; their scales need not be.
            v = _unpack_int8(tl.load(value + at[:, None]), FLOAT32)
            v_scale = tl.load(value_scale + head_at + at, mask=inside, other=0.0)[None, :]
        else:
            k = ()
            v = ()
            k_scale = 1.0
            v_scale = 1.0
            for part in tl.static_range(PARTS):
                at_part = at[:, None] + part * (HEAD // PARTS)
                k = k + (tl.load(key + at_part),)  # noqa: RUF005
                # Unwritten slots may hold NaN, and 0 * NaN is NaN.
                v = v + (tl.load(value + at_part, mask=inside[:, None], other=0.0),)  # noqa: RUF005
        # Look the next tile's pages up an iteration ahead: the loads of keys then wait for nothing, and pipeline.
        pages = _pages(table, start + KEYS, seq_len, PAGE, KEYS, RUN)
        scores = _scores(q, factor, k, k_scale, FLOAT32, QUANTIZED)
        state = _attend(state, scores, v, v_scale, positions[None, :], span, FLOAT32, QUANTIZED, LEFT)
        if TAIL:
            scores = _scores(tail_q, tail_factor, k, k_scale, FLOAT32, QUANTIZED)
            tail_state = _attend(
                tail_state, scores, v, v_scale, positions[None, :], tail_span, FLOAT32, QUANTIZED, LEFT
            )  # fmt: skip

    base = ((slot * tl.num_programs(1) + head) * tl.num_programs(0) + q_tile) * (ROWS + TAIL)
    _store(state, partial, partial_lse, base + tl.arange(0, ROWS), HEAD, PARTS)
    if TAIL:
        _store(tail_state, partial, partial_lse, base + ROWS + tl.arange(0, TAIL), HEAD, PARTS)


@triton.jit(do_not_specialize=["requests", "segments", "max_q_len", "q_tiles", "kv_heads"])
def _merge_kernel(
    partial, partial_lse, out, query_start, seq_lens, requests, segments, max_q_len, q_tiles, kv_heads,
    stride_out_token, stride_out_head,
    GROUP: tl.constexpr, HEAD: tl.constexpr, LEFT: tl.constexpr, QUANTIZED: tl.constexpr, REQUESTS: tl.constexpr,
    QUOTA: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Program (request and query token, query head): merge this row's partial results of all segments, in float32."""
    request, token = tl.program_id(0) // max_q_len, tl.program_id(0) % max_q_len
    head = tl.program_id(1)
    start = tl.load(query_start + request)
    if token >= tl.load(query_start + request + 1) - start:
        return
    counts, _ = _deal(query_start, seq_lens, requests, segments, LEFT, KEYS, QUOTA, REQUESTS)
    index = tl.arange(0, REQUESTS)
    slot = tl.sum(tl.where(index < request, counts, 0))
    count = tl.sum(tl.where(index == request, counts, 0))
    if count == 0:
        return
    row = token * GROUP + head % GROUP
    # A slot holds [KV head, query tile, row of the tile]; this row lies at the same place in each.
    base = (head // GROUP * q_tiles + row // BLOCK) * BLOCK + row % BLOCK
    rows_per_slot = kv_heads * q_tiles * BLOCK

    dims = tl.arange(0, HEAD)
    highest = float("-inf")
    total = 0.0
    merged = tl.zeros((HEAD,), tl.float32)
    for chunk in range(0, count, CHUNK):
        segment = chunk + tl.arange(0, CHUNK)
        inside = segment < count
        at = base + (slot + segment) * rows_per_slot
        lse = tl.load(partial_lse + at, mask=inside, other=float("-inf"))
        values = tl.load(partial + at.to(tl.int64)[:, None] * HEAD + dims[None, :], mask=inside[:, None], other=0.0)
        new = tl.maximum(highest, tl.max(lse))
        shift = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(lse - shift)
        decay = tl.exp2(highest - shift)
        total = total * decay + tl.sum(weights)
        merged = merged * decay + tl.sum(weights[:, None] * values, 0)
        highest = new
    merged = merged / tl.where(total > 0, total, 1.0)
    if QUANTIZED:  # the partial results hold every fourth dimension side by side, as `_unpack_int8` yields them
        dims = dims % (HEAD // 4) * 4 + dims // (HEAD // 4)
    at = out + (start + token).to(tl.int64) * stride_out_token + head * stride_out_head
    tl.store(at + dims, merged.to(out.dtype.element_ty))


@dataclass(frozen=True)
class Tiling:
    """Shape of a program: `rows` + `tail` packed query rows (two dots, for 48 would pad to 64), `keys` a step."""

    rows: int
    tail: int
    keys: int
    parts: int  # dots that the head dimension of unquantized keys and values is cut into
    warps: int
    shared: int  # KiB of shared memory, at most
    stages: int = 3  # two tiles in flight; with 2 the loads do not overlap the arithmetic

    @property
    def block(self) -> int:
        return self.rows + self.tail


# By (head size up to, int8), of rising block size: all within the 99 KB that a block may use on sm_86, where they leave
# room for one program a multiprocessor. Those of 32 and 48 rows (head size 128: 32, bfloat16) are the fastest on an
# H200 among 16 to 128 keys, 1 to 4 parts and 2 to 8 warps; the others follow them. (16, 16): one dot of 32 rows spills.
TILINGS = {
    (256, False): (Tiling(16, 0, 32, 4, 4, 74), Tiling(32, 0, 32, 4, 4, 83), Tiling(32, 16, 32, 4, 4, 91)),
    (256, True): (Tiling(16, 0, 64, 4, 4, 76), Tiling(32, 0, 64, 4, 4, 86), Tiling(32, 16, 64, 4, 8, 94)),
    (128, False): (Tiling(16, 0, 64, 2, 4, 71), Tiling(32, 0, 64, 2, 4, 77), Tiling(32, 16, 64, 2, 4, 81)),
    (128, True): (Tiling(16, 0, 64, 4, 4, 40), Tiling(16, 16, 64, 4, 4, 44), Tiling(32, 16, 64, 4, 8, 50)),
}
# Where a block may use more (sm_90), one tile holds the rows of a verify step: 48 rows take 0.85 of the time, 96 rows
# 0.61.
WIDE_TILINGS = {(256, False): (*TILINGS[256, False][:2], Tiling(64, 0, 32, 4, 4, 129), Tiling(128, 0, 32, 1, 8, 161))}
QUOTA = 2  # tiles that a program walks at least; 1 costs more in merging than it saves
MERGE_CHUNK = 64  # partial results merged at a time


@dataclass(frozen=True)
class Gpu:
    """What the launch depends on: multiprocessors, and bytes of shared memory in each."""

    multiprocessors: int
    shared_memory: int

    @classmethod
    def of(cls, device: torch.device | str) -> "Gpu":
        properties = torch.cuda.get_device_properties(device)
        return cls(properties.multi_processor_count, properties.shared_memory_per_multiprocessor)

    def resident(self, tiling: Tiling) -> int:
        """Programs that run at once: 8 warps fill a multiprocessor's registers; a block reserves 1 KiB more."""
        blocks = min(8 // tiling.warps, self.shared_memory // ((tiling.shared + 1) << 10))
        return self.multiprocessors * max(1, blocks)


RTX_3090 = Gpu(82, 100 << 10)


@dataclass(frozen=True)
class Launch:
    """What the host decides for a call, from shapes and bounds alone."""

    tiling: Tiling
    q_tiles: int  # tiles of packed query rows
    segments: int  # runs of KV tiles to deal out for each KV head and query tile
    slots: int  # runs at most: every request but one may leave an incomplete one

    def rows(self, kv_heads: int) -> int:
        """Rows of scratch."""
        return self.slots * kv_heads * self.q_tiles * self.tiling.block


def choose_tiling(rows: int, head_size: int, quantized: bool, gpu: Gpu) -> Tiling:
    """The smallest tiling that holds `rows` packed rows (query tokens x query heads of a KV head), else the largest.

    Rows beyond one tile go to further programs, neighbours in launch order: they share the KV reads through the L2.
    """
    kind = (128 if head_size <= 128 else 256, quantized)
    tilings = WIDE_TILINGS.get(kind, ()) if gpu.shared_memory >= 200 << 10 else ()
    tilings = tilings or TILINGS[kind]
    return next((tiling for tiling in tilings if rows <= tiling.block), tilings[-1])


def plan_launch(
    requests: int,
    max_q_len: int,
    max_seq_len: int,
    *,
    heads: int,
    kv_heads: int,
    head_size: int,
    quantized: bool,
    gpu: Gpu,
) -> Launch:
    """As many segments as fill the GPU once, or fewer where `max_seq_len` has less work than that."""
    rows = max_q_len * heads // kv_heads
    tiling = choose_tiling(rows, head_size, quantized, gpu)
    q_tiles = triton.cdiv(rows, tiling.block)
    work = requests * triton.cdiv(max_seq_len, tiling.keys * QUOTA)
    segments = max(1, min(gpu.resident(tiling) // (kv_heads * q_tiles), work))
    return Launch(tiling, q_tiles, segments, segments + requests - 1)


class SplitKVScratch:
    """Partial results between the two passes, allocated once: a captured CUDA graph holds their addresses.

    Serves calls of up to `max_requests` requests with up to `max_q_len` query tokens each, one call at a time in stream
    order; the layers of a model share one. `gpu` defaults to the device's.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        heads: int,
        kv_heads: int,
        head_size: int,
        max_requests: int,
        max_q_len: int,
        gpu: Gpu | None = None,
    ):
        self.gpu = gpu or Gpu.of(device)
        self.head_size = head_size
        self.rows = self.rows_for(heads, kv_heads, head_size, max_requests, max_q_len, self.gpu)
        self.partial = torch.empty(self.rows * head_size, dtype=torch.float32, device=device)
        self.lse = torch.empty(self.rows, dtype=torch.float32, device=device)

    @staticmethod
    def rows_for(heads: int, kv_heads: int, head_size: int, max_requests: int, max_q_len: int, gpu: Gpu) -> int:
        """Rows of `head_size` + 1 float32: what a memory planner has to count."""
        return max(
            plan_launch(
                max_requests,
                q_len,
                1 << 31,
                heads=heads,
                kv_heads=kv_heads,
                head_size=head_size,
                quantized=quantized,
                gpu=gpu,
            ).rows(kv_heads)
            for q_len in range(1, max_q_len + 1)
            for quantized in (False, True)
        )

    @property
    def nbytes(self) -> int:
        return self.partial.nbytes + self.lse.nbytes


def split_kv_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    seqused_k: torch.Tensor,
    max_seqlen_k: int,
    block_table: torch.Tensor,
    softmax_scale: float,
    scratch: SplitKVScratch,
    causal: bool = True,
    window_size: tuple[int, int] | None = None,
    k_scale_cache: torch.Tensor | None = None,
    v_scale_cache: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of `q` over a paged KV cache, written to `out`; arguments are named as FlashAttention's.

    Args:
        q, out: [tokens, heads, head_size], float16 or bfloat16 (float32 in the interpreter); head_size 64, 128 or 256.
        k, v: [pages, page_size, kv_heads, head_size] with equal strides, of q's dtype; or int8 with scales (then the
            last dimension may include the scale's 4 bytes, and k's strides and address are multiples of 8 bytes).
        cu_seqlens_q: int32 [requests + 1], where each request's query tokens start. A request may have none.
        max_seqlen_q, max_seqlen_k: bounds of the query tokens and of `seqused_k`; with the shapes they fix the grid.
        seqused_k: int32 [requests], tokens in the cache, the query tokens included. 0: the request is left out.
        block_table: int32 [requests, n], page numbers.
        causal: query token i attends up to its own position; overrides the right half of the window.
        window_size: (left, right) positions around the query's own; -1 or None: no bound.
        k_scale_cache, v_scale_cache: float32 [pages, page_size, kv_heads], strides those of k and v in 4-byte units.

    Against int8 keys, q is rounded to 15 bits of its row's largest value; weights are rounded to q's dtype, or to
    float16 against int8 values. Raises ValueError on unfit shapes, dtypes or strides and when `scratch` is too small.
    Allocates nothing.
    """
    quantized = k_scale_cache is not None
    _check(q, k, v, out, cu_seqlens_q, seqused_k, block_table, k_scale_cache, v_scale_cache)
    _, heads, head_size = q.shape
    _, page_size, kv_heads, _ = k.shape
    requests = seqused_k.shape[0]
    left, right = window_size or (-1, -1)
    launch = plan_launch(
        requests,
        max_seqlen_q,
        max_seqlen_k if left < 0 else min(max_seqlen_k, left + max_seqlen_q),
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        quantized=quantized,
        gpu=scratch.gpu,
    )
    if launch.rows(kv_heads) > scratch.rows or head_size > scratch.head_size:
        raise ValueError(
            f"split_kv_attention: scratch of {scratch.rows} x {scratch.head_size} is too small for {requests} requests "
            f"of {max_seqlen_q} query tokens: {launch.rows(kv_heads)} x {head_size}"
        )

    tiling = launch.tiling
    if quantized:
        k, v = k.view(torch.int32), v.view(torch.int32)
    shared = {
        "GROUP": heads // kv_heads,
        "HEAD": head_size,
        "LEFT": left,
        "QUANTIZED": quantized,
        "REQUESTS": triton.next_power_of_2(requests),
        "QUOTA": QUOTA,
        "KEYS": tiling.keys,
    }
    _segment_kernel[(launch.q_tiles, kv_heads, launch.slots)](
        q,
        k,
        v,
        k_scale_cache,
        v_scale_cache,
        block_table,
        cu_seqlens_q,
        seqused_k,
        scratch.partial,
        scratch.lse,
        softmax_scale * LOG2_E,
        requests,
        launch.segments,
        *q.stride()[:2],
        *k.stride()[:3],
        block_table.stride(0),
        PAGE=page_size,
        RIGHT=0 if causal else right,
        FLOAT32=INTERPRETED,
        ROWS=tiling.rows,
        TAIL=tiling.tail,
        RUN=math.gcd(page_size, tiling.keys),
        PARTS=4 if quantized else max(1, tiling.parts * head_size // (128 if head_size <= 128 else 256)),
        STAGES=tiling.stages,
        num_warps=tiling.warps,
        **shared,
    )
    _merge_kernel[(requests * max_seqlen_q, heads)](
        scratch.partial,
        scratch.lse,
        out,
        cu_seqlens_q,
        seqused_k,
        requests,
        launch.segments,
        max_seqlen_q,
        launch.q_tiles,
        kv_heads,
        *out.stride()[:2],
        BLOCK=tiling.block,
        CHUNK=MERGE_CHUNK,
        num_warps=4,
        **shared,
    )
    return out


def _check(q, k, v, out, cu_seqlens_q, seqused_k, block_table, k_scale, v_scale):
    def require(condition, message):
        if not condition:
            raise ValueError(f"split_kv_attention: {message}")

    head_size = q.shape[2]
    require(head_size in (64, 128, 256), f"head size {head_size}")
    dtypes = (torch.float16, torch.bfloat16, *((torch.float32,) if INTERPRETED else ()))
    require(q.dtype in dtypes, f"q is {q.dtype}")
    require(out.shape == q.shape, "out and q differ in shape")
    require(q.shape[1] % k.shape[2] == 0, "query heads are no multiple of the KV heads")
    require(k.shape == v.shape and k.stride() == v.stride(), "k and v differ in shape or strides")
    require(q.stride(2) == out.stride(2) == k.stride(3) == 1, "the head dimension must be contiguous")
    indices = (cu_seqlens_q, seqused_k, block_table)
    require(all(t.dtype == torch.int32 and t.stride(-1) == 1 for t in indices), "indices must be contiguous int32")
    require(len(cu_seqlens_q) == len(seqused_k) + 1 == len(block_table) + 1, "indices differ in length")
    if k_scale is None:
        require(k.dtype == q.dtype and k.shape[3] == head_size, f"k is {k.dtype} [.., {k.shape[3]}]")
        return
    require(k.dtype == torch.int8 and k.shape[3] in (head_size, head_size + 4), f"k is {k.dtype} [.., {k.shape[3]}]")
    require(all(n % 8 == 0 for n in (k.data_ptr(), *k.stride()[:3])), "int8 keys must lie at multiples of 8 bytes")
    require(
        k_scale.stride() == v_scale.stride() == tuple(n // 4 for n in k.stride()[:3]),
        "the scales' strides are not those of the codes",
    )


def split_kv_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    block_table: torch.Tensor,
    softmax_scale: float,
    causal: bool = True,
    window_size: tuple[int, int] | None = None,
    k_scale_cache: torch.Tensor | None = None,
    v_scale_cache: torch.Tensor | None = None,
) -> torch.Tensor:
    """The formula above in float32, a request at a time. Returns float32 [tokens, heads, head_size]; 0 where no key."""
    heads, head_size = q.shape[1:]
    left, right = window_size or (-1, -1)
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    starts = cu_seqlens_q.tolist()
    for request, seq_len in enumerate(seqused_k.tolist()):
        tokens = slice(starts[request], starts[request + 1])
        q_len = tokens.stop - tokens.start
        position = torch.arange(seq_len, device=q.device)
        page, slot = block_table[request].long()[position // k.shape[1]], position % k.shape[1]
        keys, values = k[page, slot, :, :head_size].float(), v[page, slot, :, :head_size].float()
        if k_scale_cache is not None:
            keys, values = keys * k_scale_cache[page, slot, :, None], values * v_scale_cache[page, slot, :, None]
        group = heads // k.shape[2]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        distance = position - torch.arange(seq_len - q_len, seq_len, device=q.device)[:, None]
        allowed = torch.ones_like(distance, dtype=torch.bool)
        if causal or right >= 0:
            allowed &= distance <= (0 if causal else right)
        if left >= 0:
            allowed &= distance >= -left
        scores = torch.einsum("qhd,khd->hqk", q[tokens].float(), keys) * softmax_scale
        weights = scores.masked_fill(~allowed, float("-inf")).softmax(-1).nan_to_num(0.0)
        out[tokens] = torch.einsum("hqk,khd->qhd", weights, values)
    return out
