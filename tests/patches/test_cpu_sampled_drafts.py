"""Sampling with drafts through V1's rejection sampler and the CPU's stand-ins for its kernels."""

from contextlib import nullcontext

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's stand-ins")

VOCAB = 8
# The 0.9999 quantile of chi-square with VOCAB - 1 degrees of freedom.
LIMIT = 29.9


@pytest.fixture
def kernels(monkeypatch):
    """The rejection sampler's module as CPUModelRunner leaves it."""
    import vllm._custom_ops  # noqa: F401  (loads the C++ kernels)
    import vllm.utils.cpu_triton_utils as stand_ins
    from vllm.v1.sample import rejection_sampler

    def install():
        for name in (
            "rejection_greedy_sample_kernel",
            "rejection_random_sample_kernel",
            "expand_kernel",
            "sample_recovered_tokens_kernel",
        ):
            monkeypatch.setattr(rejection_sampler, name, getattr(stand_ins, name))
        return rejection_sampler

    return install


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_each_token_gets_its_request_s_value(patched, kernels, on, dtype):
    with patched("cpu_sampled_drafts") if on else nullcontext():
        sampler = kernels()
        values = torch.tensor([7, 0, 17], dtype=dtype) / (2 if dtype.is_floating_point else 1)
        totals = torch.tensor([2, 3, 6], dtype=torch.int32)
        expanded = sampler.expand_batch_to_tokens(values.to(dtype), totals, 6, replace_from=0, replace_to=1)
    first, _, last = values.tolist()
    assert (expanded.tolist() == [first, first, 1, last, last, last]) is on


@pytest.mark.parametrize("temperature", [0.5, 1.7])
@pytest.mark.parametrize("with_draft_probs", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_the_first_token_has_the_target_s_distribution(patched, kernels, temperature, with_draft_probs, padded):
    """Drafts from their own distribution, or -1, which is always rejected; 20,000 requests of two drafts."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(VOCAB, generator=rng) * 2
    proposal = torch.softmax(torch.randn(VOCAB, generator=rng), 0)
    requests, drafts = 20_000, 2
    if with_draft_probs:
        ids = proposal.multinomial(requests * drafts, replacement=True, generator=rng)
        draft_probs = proposal.repeat(requests * drafts, 1)
    else:
        ids, draft_probs = torch.full((requests * drafts,), 3), None
    if padded:
        # What the grammar forbids has probability 0 in the target, so that its draft is rejected anyway.
        logits[ids[0]] = float("-inf")
        ids = ids.masked_fill(logits[ids] == float("-inf"), -1)
    totals = torch.arange(1, requests + 1, dtype=torch.int32) * drafts
    torch.manual_seed(1)
    with patched("cpu_sampled_drafts"), patched("hybrid_min_one_draft"):
        sampler = kernels()
        temperatures = sampler.expand_batch_to_tokens(
            torch.full((requests,), temperature), totals, requests * drafts, replace_from=0, replace_to=1
        )
        tokens = sampler.rejection_sample(
            ids.to(torch.int32),
            [drafts] * requests,
            drafts,
            totals,
            draft_probs,
            logits.repeat(requests * drafts, 1).div_(temperatures.unsqueeze(1)),
            torch.zeros(requests, 1, dtype=torch.int32),
            sampling_metadata(temperature, requests),
        )
    expected = torch.softmax(logits / temperature, 0) * requests
    seen = torch.bincount(tokens[:, 0].long(), minlength=VOCAB)
    assert seen[expected == 0].sum() == 0
    assert ((seen - expected).square() / expected)[expected > 0].sum() < LIMIT


def sampling_metadata(temperature: float, requests: int):
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    none = torch.empty(0)
    return SamplingMetadata(
        temperature=torch.full((requests,), temperature),
        all_greedy=False,
        all_random=True,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none,
        output_token_ids=[],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def test_revert(patched):
    import vllm.utils.cpu_triton_utils as stand_ins

    stock = stand_ins.expand_kernel
    for _ in range(2):
        with patched("cpu_sampled_drafts"):
            assert stand_ins.expand_kernel is not stock
        assert stand_ins.expand_kernel is stock
