"""Top-k and top-p without a sort, against the stably sorted form, and that against vLLM's own code."""

import functools

import pytest
import torch

from qwen38_3090.kernels.truncate import CAPACITY, TruncationScratch, truncate, truncate_reference, undecided

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY = 20011  # 157 groups, the last one incomplete, in more than one row of coarse maxima
INF = float("inf")


def normal(rows, seed=0, scale=3.0, vocabulary=VOCABULARY):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocabulary, generator=generator).mul(scale).to(DEVICE)


def parameters(k, p):
    k = torch.tensor(k, dtype=torch.int32, device=DEVICE)
    return k, None if p is None else torch.tensor(p, dtype=torch.float32, device=DEVICE)


def run(logits, k, p, **options):
    scratch = TruncationScratch(DEVICE, logits.shape[0] + 1, logits.shape[1])
    out = torch.full_like(logits, 7.0, dtype=torch.float32)
    return truncate(logits, k, p, scratch, out=out, **options)


def check(logits, k, p, relative=1e-6):
    """The masked logits are the reference's, undecided places aside, of which there are few."""
    before = logits.clone()
    got = run(logits, k, p)
    want = truncate_reference(logits.float(), k, p)
    differs = (got != want) & ~undecided(logits.float(), k, p, relative)
    assert not differs.any(), differs.nonzero()[:8]
    assert (got != want).sum() <= 0.02 * (want > -INF).sum()
    assert torch.equal(logits, before)
    return got


def check_probabilities(logits, k, p):
    """The probabilities are those of the masked logits."""
    got = run(logits, k, p)
    probabilities = run(logits, k, p, probabilities=True)
    empty = (got == -INF).all(dim=-1, keepdim=True)
    torch.testing.assert_close(probabilities, got.softmax(dim=-1).masked_fill(empty, 0.0), rtol=2e-6, atol=1e-9)
    assert ((probabilities > 0) <= (got > -INF)).all()


@pytest.mark.parametrize("p", [None, 0.95, 1e-9])
@pytest.mark.parametrize("tied", [False, True])
def test_random_rows(p, tied):
    k = [1, 20, 64]
    logits = normal(len(k), seed=int(tied))
    if tied:  # the values of a bfloat16 logit, coarser still: several at the k-th value and at the cut
        logits = logits.bfloat16().float().mul(4).round().div(4)
    k, p = parameters(k, None if p is None else [p] * len(k))
    got = check(logits, k, p)
    if p is None and tied:
        assert ((got > -INF).sum(1) > k).any()


@pytest.mark.parametrize("temperature", [0.05, 1.7])
def test_random_parameters(temperature):
    """Low temperatures make probabilities that float32 can't hold: p = 1 then drops them, as stock does."""
    generator = torch.Generator().manual_seed(3)
    logits = normal(5, seed=5).bfloat16().float() / temperature
    k = torch.randint(1, 65, (5,), generator=generator).tolist()
    p = torch.rand(5, generator=generator).tolist()
    p[0] = 1.0
    check(logits, *parameters(k, p))


def test_probabilities():
    logits = normal(5, seed=7).bfloat16().float()
    logits[3] = -INF
    logits[4, 100 : 100 + 2 * CAPACITY] = 30.0
    check_probabilities(logits, *parameters([20, 64, 0, 20, 64], [0.9, 1.0, 0.9, 0.9, 0.5]))


def test_of_equal_values_at_the_cut_the_lower_indices_go():
    logits = torch.full((1, VOCABULARY), -50.0, device=DEVICE)
    places = [4, 70, 71, 500, 4200, 16384, 16385, VOCABULARY - 1]
    logits[0, places] = 2.0
    got = check(logits, *parameters([5], [0.55]))  # all 8 tie at the 5th value; 3/8 <= 0.45 < 4/8
    assert (got[0] > -INF).nonzero().flatten().tolist() == places[3:]
    got = check(logits, *parameters([5], [1e-9]))
    assert (got[0] > -INF).nonzero().flatten().tolist() == places[-1:]


def test_few_finite_logits():
    """A grammar's mask: fewer finite logits than k, in one group or far apart, or none."""
    logits = torch.full((4, VOCABULARY), -INF, device=DEVICE)
    logits[0, 17] = 1.5
    logits[1, 3:13] = torch.arange(10.0, device=DEVICE)
    logits[2, ::1000] = torch.arange(21.0, device=DEVICE)
    for p in (None, [0.9, 1.0, 0.9, 0.9]):
        got = check(logits, *parameters([20, 20, 64, 20], p))
        assert (got[3] == -INF).all()
        if p is None:
            assert torch.equal(got, logits)


def test_more_candidates_than_usual():
    logits = normal(2, seed=10)
    logits[0, ::50] = 30.0
    logits[1, 5000:5700] = torch.linspace(20, 22, 700, device=DEVICE)
    check(logits, *parameters([20, 64], [0.37, 0.9]))


@pytest.mark.parametrize("p", [None, 1.0, 0.37])
def test_more_candidates_than_fit(p):
    """The slow path: everything ties, ties below larger logits, the largest logits side by side, ties of no weight."""
    logits = normal(5, seed=9)
    logits[0] = 0.25
    logits[1, : 2 * CAPACITY] = 30.0
    logits[1, 4000:4030] = torch.linspace(30.5, 37, 30, device=DEVICE)
    logits[2, : 64 * 128] = torch.linspace(20, 40, 64 * 128, device=DEVICE).view(64, 128).flip(0).flatten()
    logits[3] = -logits[3].abs() - 1
    logits[3, : 2 * CAPACITY] = 0.0
    logits[3, 1 : 2 * CAPACITY : 2] = -0.0
    logits[4] -= 1000
    logits[4, : 2 * CAPACITY] = -200.0
    logits[4, 7:10] = 1.0
    check(logits, *parameters([20, 50, 64, 3, 20], None if p is None else [p] * 5), relative=1e-4)


def test_rows_without_top_k_are_left_alone():
    logits = normal(5, seed=2)
    logits[4] = -INF
    k, p = parameters([0, 65, VOCABULARY, 20, -1], [0.5] * 5)
    got = check(logits, k, p)
    assert torch.equal(got[:3], logits[:3])
    assert (got[3] > -INF).sum() < 20


def test_nan_counts_as_minus_infinity():
    logits = normal(2, seed=4)
    logits[0, 5::7] = float("nan")
    logits[1] = float("nan")
    k, p = parameters([20, 20], [0.9, 0.9])
    assert torch.equal(run(logits, k, p), truncate_reference(logits.nan_to_num(nan=-INF), k, p))


@pytest.mark.parametrize("vocabulary", [1, 127, 128, 129, 16384])
def test_small_vocabularies(vocabulary):
    check(normal(2, seed=vocabulary, vocabulary=vocabulary), *parameters([1, 64], [0.9, 0.9]))


def test_strides_and_dtypes():
    wide = normal(2, seed=6, vocabulary=VOCABULARY + 5)
    k, p = parameters([20, 64], [0.9, 0.95])
    check(wide[:, 3 : VOCABULARY + 3], k, p)
    check(wide[:, :VOCABULARY].bfloat16(), k, p)
    assert torch.equal(run(wide, k.long(), p), run(wide, k, p))
    target = torch.full((2, VOCABULARY + 100), 7.0, device=DEVICE)
    scratch = TruncationScratch(DEVICE, 2, VOCABULARY)
    truncate(wide[:, :VOCABULARY], k, p, scratch, out=target[:, 50:-50])
    assert torch.equal(target[:, 50:-50], truncate_reference(wide[:, :VOCABULARY], k, p))
    assert (target[:, :50] == 7).all() and (target[:, -50:] == 7).all()


def test_scratch_is_fixed_and_reusable():
    scratch = TruncationScratch(DEVICE, 4, VOCABULARY)
    addresses = [t.data_ptr() for t in (scratch.maxima, scratch.chosen_groups, scratch.values, scratch.tokens)]
    for rows in (2, 1):
        logits = normal(rows, seed=rows)
        k, p = parameters([20] * rows, [0.9] * rows)
        assert torch.equal(truncate(logits, k, p, scratch), truncate_reference(logits, k, p))
    assert addresses == [t.data_ptr() for t in (scratch.maxima, scratch.chosen_groups, scratch.values, scratch.tokens)]
    assert truncate(logits[:0], k[:0], p[:0], scratch).shape == (0, VOCABULARY)


def test_refusals():
    scratch = TruncationScratch(DEVICE, 2, VOCABULARY)
    logits = normal(2)
    k, p = parameters([20, 20], [0.9, 0.9])
    for arguments, options in [
        ((logits.double(), k, p), {}),
        ((normal(3), *parameters([20] * 3, [0.9] * 3)), {}),
        ((logits[:, :100], k, p), {}),
        ((logits, k[:1], p), {}),
        ((logits, k.float(), p), {}),
        ((logits, k, p.double()), {}),
        ((logits, k, p), {"out": logits}),
        ((logits, k, p), {"out": logits.bfloat16()}),
    ]:
        with pytest.raises(ValueError):
            truncate(*arguments, scratch, **options)


@pytest.mark.parametrize("p", [None, [1.0, 0.95, 0.6, 0.3, 1e-9, 0.8]])
def test_the_reference_is_what_vllm_computes(p, monkeypatch):
    """vLLM's sort is stable on CUDA (a radix sort) though it doesn't ask for that; on the CPU it has to be told."""
    stock = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler")
    monkeypatch.setattr(torch.Tensor, "sort", functools.partialmethod(torch.Tensor.sort, stable=True))
    logits = normal(6, seed=8).bfloat16().float().mul(4).round().div(4)
    logits[5, 30:] = -INF
    k, p = parameters([1, 20, 64, 40, 5, 50], p)
    want = stock.apply_top_k_top_p_pytorch(logits.clone(), k, p)
    assert torch.equal(truncate_reference(logits, k, p), want)


@pytest.mark.gpu
@pytest.mark.parametrize("probabilities", [False, True])
def test_a_captured_graph_serves_new_inputs(probabilities):
    scratch = TruncationScratch(DEVICE, 5, 248320)
    logits = normal(5, vocabulary=248320)
    k, p = parameters([20] * 5, [0.95] * 5)
    out = torch.empty_like(logits)
    truncate(logits, k, p, scratch, out=out, probabilities=probabilities)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        truncate(logits, k, p, scratch, out=out, probabilities=probabilities)
    for seed in range(1, 4):
        logits.copy_(normal(5, seed=seed, vocabulary=248320))
        k.copy_(torch.tensor([seed, 10, 64, 0, 20]))
        p.copy_(torch.tensor([0.9, 0.5, 1.0, 0.9, 0.1]))
        graph.replay()
        want = truncate_reference(logits, k, p)
        torch.testing.assert_close(out, want.softmax(-1) if probabilities else want, rtol=1e-5, atol=1e-9)
