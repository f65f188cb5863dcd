"""Multi-block softmax against PyTorch's."""

import pytest
import torch

from qwen38_3090.kernels.softmax import BLOCK, SoftmaxScratch, softmax, softmax_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF = float("inf")


def rows_of(count, columns, seed=0, scale=4.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, columns, generator=generator).mul(scale).to(DEVICE)


def check(logits):
    out = torch.full_like(logits, 7.0, dtype=torch.float32)
    got = softmax(logits, SoftmaxScratch(DEVICE, *logits.shape), out=out)
    assert got is out
    torch.testing.assert_close(got, softmax_reference(logits), rtol=5e-6, atol=1e-12)
    torch.testing.assert_close(got, logits.double().softmax(-1).nan_to_num(0.0).float(), rtol=1e-5, atol=1e-12)
    return got


@pytest.mark.parametrize("columns", [1, 31, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 77])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shapes_and_dtypes(columns, dtype):
    check(rows_of(3, columns, seed=columns).to(dtype))


@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_far_from_zero(offset):
    check(rows_of(2, 2 * BLOCK + 5) + offset)


def test_masked_rows():
    """Whole chunks of -inf, one finite logit, and nothing finite at all."""
    logits = rows_of(4, 3 * BLOCK)
    logits[0, : 2 * BLOCK] = -INF
    logits[1] = -INF
    logits[1, BLOCK + 3] = -123.0
    logits[2] = -INF
    got = check(logits)
    assert got[1, BLOCK + 3] == 1 and got[1].sum() == 1
    assert (got[2] == 0).all()


@pytest.mark.parametrize("bad", [float("nan"), INF])
def test_not_a_number_is_not_hidden(bad):
    logits = rows_of(2, 2 * BLOCK)
    logits[0, 5] = bad
    got = softmax(logits, SoftmaxScratch(DEVICE, 2, 2 * BLOCK))
    assert got[0].isnan().all()
    torch.testing.assert_close(got[1], logits[1].softmax(-1))


def test_in_place_strided_and_repeated():
    scratch = SoftmaxScratch(DEVICE, 4, 2 * BLOCK)
    addresses = scratch.highs.data_ptr(), scratch.sums.data_ptr()
    logits = rows_of(4, BLOCK + 50)[:, 7 : BLOCK + 20]
    want = softmax_reference(logits)
    assert softmax(logits, scratch, out=logits) is logits
    torch.testing.assert_close(logits, want, rtol=5e-6, atol=1e-12)
    logits = rows_of(1, 2 * BLOCK, seed=1)
    torch.testing.assert_close(softmax(logits, scratch), softmax_reference(logits), rtol=5e-6, atol=1e-12)
    assert addresses == (scratch.highs.data_ptr(), scratch.sums.data_ptr())
    assert softmax(logits[:0], scratch).shape == (0, 2 * BLOCK)


def test_refusals():
    scratch = SoftmaxScratch(DEVICE, 2, BLOCK)
    logits = rows_of(2, BLOCK)
    for wrong, options in [
        (rows_of(3, BLOCK), {}),
        (rows_of(2, BLOCK + 1), {}),
        (logits.double(), {}),
        (logits.t(), {}),
        (logits, {"out": logits.bfloat16()}),
        (logits, {"out": torch.empty(1, BLOCK, device=DEVICE)}),
    ]:
        with pytest.raises(ValueError):
            softmax(wrong, scratch, **options)


@pytest.mark.gpu
def test_a_captured_graph_serves_new_inputs():
    scratch = SoftmaxScratch(DEVICE, 5, 248320)
    logits, out = rows_of(5, 248320), torch.empty(5, 248320, device=DEVICE)
    softmax(logits, scratch, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        softmax(logits, scratch, out=out)
    logits.copy_(rows_of(5, 248320, seed=1))
    graph.replay()
    torch.testing.assert_close(out, softmax_reference(logits), rtol=5e-6, atol=1e-12)
