"""Softmax over the vocabulary, each row spread over many programs.

    out[r, t] = exp(x[r, t] - m[r]) / sum_t exp(x[r, t] - m[r]),    m[r] = max_t x[r, t]

PyTorch gives each row one thread block, so the few rows of a decode or verify step leave most of the GPU idle. Here a
first launch stores the maximum and the sum of exponentials of each chunk; in the second, the programs of each chunk
combine those (Milakov and Gimelshein, https://arxiv.org/abs/1805.02867) and write. The second read comes from the L2.
"""

import torch
import triton
import triton.language as tl

BLOCK = 4096
WARPS = 8

NEGATIVE_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def _finite(highest):
    """`highest`, or 0 for -inf: a shift under which exp(-inf - shift) is 0 and not NaN."""
    return tl.where(highest == NEGATIVE_INFINITY, 0.0, highest)


@triton.jit
def _chunk_kernel(logits, stride, highs, sums, columns, chunks, BLOCK: tl.constexpr):
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + column, mask=column < columns, other=NEGATIVE_INFINITY).to(tl.float32)
    highest = tl.max(x)
    tl.store(highs + row * chunks + chunk, highest)
    tl.store(sums + row * chunks + chunk, tl.sum(tl.exp(x - _finite(highest))))


@triton.jit
def _write_kernel(
    logits, stride, highs, sums, out, out_stride, columns, chunks, CHUNKS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + column, mask=column < columns, other=NEGATIVE_INFINITY).to(tl.float32)
    other = tl.arange(0, CHUNKS)
    high = tl.load(highs + row * chunks + other, mask=other < chunks, other=NEGATIVE_INFINITY)
    partial = tl.load(sums + row * chunks + other, mask=other < chunks, other=0.0)
    shift = _finite(tl.max(high))
    total = tl.sum(partial * tl.exp(high - shift))
    e = tl.exp(x - shift)
    tl.store(out + row * out_stride + column, tl.where(total == 0, 0.0, e / total), mask=column < columns)


class SoftmaxScratch:
    """Partial results, allocated once: a captured CUDA graph holds their addresses.

    Serves calls of up to `max_rows` rows of up to `max_columns`, one call at a time, in stream order.
    """

    def __init__(self, device: torch.device | str, max_rows: int, max_columns: int):
        self.numel = max_rows * triton.cdiv(max_columns, BLOCK)
        self.highs = torch.empty(self.numel, dtype=torch.float32, device=device)
        self.sums = torch.empty(self.numel, dtype=torch.float32, device=device)

    @property
    def nbytes(self) -> int:
        return self.highs.nbytes + self.sums.nbytes


def softmax(logits: torch.Tensor, scratch: SoftmaxScratch, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Softmax of each row in float32.

    Args:
        logits: [rows, columns], float32, float16 or bfloat16, rows contiguous.
        out: float32 [rows, columns], rows contiguous; may be `logits`. None: allocated.

    A row of -inf gives zeros (PyTorch: NaN). NaN in a row, or +inf, gives NaN, as in PyTorch.
    Raises ValueError on unfit shapes, dtypes or strides, and when `scratch` is too small. Never synchronises.
    """
    rows, columns = logits.shape
    if out is None:
        out = torch.empty(rows, columns, dtype=torch.float32, device=logits.device)
    chunks = triton.cdiv(columns, BLOCK)
    if not logits.dtype.is_floating_point or logits.dtype.itemsize > 4 or logits.stride(1) != 1:
        raise ValueError("logits: float32, float16 or bfloat16 with contiguous rows")
    if out.shape != logits.shape or out.dtype != torch.float32 or out.stride(1) != 1:
        raise ValueError("out: float32, in the shape of the logits, with contiguous rows")
    if rows * chunks > scratch.numel:
        raise ValueError(f"scratch of {scratch.numel} chunks is too small for {rows} x {chunks}")
    if rows == 0:
        return out
    partial = (scratch.highs, scratch.sums)
    _chunk_kernel[(chunks, rows)](logits, logits.stride(0), *partial, columns, chunks, BLOCK=BLOCK, num_warps=WARPS)
    _write_kernel[(chunks, rows)](
        logits,
        logits.stride(0),
        *partial,
        out,
        out.stride(0),
        columns,
        chunks,
        CHUNKS=triton.next_power_of_2(chunks),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return out


def softmax_reference(logits: torch.Tensor) -> torch.Tensor:
    """What `softmax` returns, by PyTorch."""
    empty = (logits == -torch.inf).all(dim=-1, keepdim=True)
    return logits.float().softmax(dim=-1).masked_fill(empty, 0.0)
