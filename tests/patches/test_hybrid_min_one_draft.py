"""A running decode of a hybrid model always has drafts to verify: stock loses recurrent state, patched never."""

import random
from contextlib import nullcontext
from itertools import cycle, takewhile
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from tests.patches import gdn
from tests.patches import scheduler_fixture as fixture
from tests.patches.scheduler_fixture import PAD

DRAFTS = 3


@pytest.fixture
def maybe(patched):
    return lambda on: patched("hybrid_min_one_draft") if on else nullcontext()


@pytest.fixture
def gpu_rules(monkeypatch):
    """The scheduler believes that it serves a GPU."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)


def serve(prompts, *, asynchronous=False, forgetful=True, seed=0, draft=None, caching=False, block=64, **options):
    """Run (prompt length, output length) pairs; returns (steps, worker, requests, scheduler)."""
    config = fixture.vllm_config(drafts=DRAFTS, caching=caching, **options)
    groups = fixture.kv_cache_config(drafts=DRAFTS, caching=caching, block=block)
    scheduler = fixture.scheduler(config, groups, asynchronous=asynchronous, log_stats=True)
    rng = random.Random(seed)
    names = [f"{i}" for i in range(len(prompts))]
    texts = {name: [rng.randrange(1000) for _ in range(sum(prompts[int(name)]) + 20)] for name in names}
    requests = [
        fixture.request(name, texts[name][:prompt], output, scheduler.hash_block_size)
        for name, (prompt, output) in zip(names, prompts, strict=True)
    ]
    worker = fixture.Worker(
        groups, texts, lambda: rng.randrange(DRAFTS + 1), placeholders=asynchronous, forgetful=forgetful
    )
    steps = fixture.run(scheduler, worker, requests, draft=draft and (lambda: draft(rng)))
    return steps, worker, requests, scheduler


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_a_drafter_with_few_proposals_or_none(maybe, on, caching):
    with maybe(on):
        steps, worker, requests, _ = serve(
            [(10, 80), (30, 80)], caching=caching, draft=lambda rng: [1] * rng.randrange(DRAFTS + 1)
        )
    assert bool(worker.faults) is not on
    assert all(request.num_output_tokens == 80 for request in requests)
    verified = [(step, name) for step in steps for name, drafts in drafts_of(step).items()]
    assert {len(drafts_of(step)[name]) for step, name in verified} == ({1, 2, 3} if on else {0, 1, 2, 3})
    if on:
        assert all(len({len(drafts) for drafts in drafts_of(step).values()}) <= 1 for step in steps)


def drafts_of(step) -> dict[str, list[int]]:
    """The drafts of each decode in a step, empty lists included."""
    decodes = step.scheduled_cached_reqs.req_ids
    return {name: step.scheduled_spec_decode_tokens.get(name, []) for name in decodes}


@pytest.fixture
def grammar():
    """Allows the multiples of three; `rows` are the rows of the bitmask that it filled."""
    from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

    class Triples(StructuredOutputGrammar):
        rows: ClassVar[list[int]] = []

        def accept_tokens(self, request_id, tokens):
            return tokens == self.validate_tokens(tokens)

        def validate_tokens(self, tokens):
            return list(takewhile(lambda token: token % 3 == 0, tokens))

        def fill_bitmask(self, bitmask, index):
            self.rows.append(index)

        def rollback(self, num_tokens):
            pass

        def is_terminated(self):
            return False

        def reset(self):
            pass

    return Triples()


@pytest.mark.parametrize("on", [False, True])
def test_drafts_that_the_grammar_forbids(maybe, grammar, on):
    """The scheduler's own path: validate, pad, and a bitmask row for each position of the block."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams
    from vllm.v1.structured_output.request import StructuredOutputRequest

    rng = random.Random(5)

    def draft():
        return [3 * rng.randrange(9) + rng.randrange(2) for _ in range(DRAFTS)]

    with maybe(on):
        config = fixture.vllm_config(drafts=DRAFTS, caching=False)
        groups = fixture.kv_cache_config(drafts=DRAFTS, caching=False)
        scheduler = fixture.scheduler(config, groups)
        scheduler.structured_output_manager.backend = SimpleNamespace(
            allocate_token_bitmask=lambda rows: torch.full((rows, 4), -1, dtype=torch.int32)
        )
        text = [3 * rng.randrange(300) for _ in range(120)]
        request = fixture.request("0", text[:10], 80, 64)
        params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="x"))
        request.structured_output_request = StructuredOutputRequest.from_sampling_params(params)
        request.structured_output_request.grammar = grammar
        worker = fixture.Worker(groups, {"0": text}, lambda: rng.randrange(DRAFTS + 1))
        scheduler.add_request(request)
        while scheduler.has_requests():
            output = scheduler.schedule()
            result = worker.execute(output)
            grammar.rows.clear()
            masks = scheduler.get_grammar_bitmask(output)
            drafts = output.scheduled_spec_decode_tokens.get("0", [])
            if masks is not None:
                length = len(drafts)
                assert len(masks.grammar_bitmask) == length + 1
                # Constrained: the rows up to that of the first padding, and the last, which is not reached.
                real = sum(token != PAD for token in drafts)
                assert grammar.rows == [*range(min(real + 1, length)), length]
            fixture.update(scheduler, output, result, draft)
    assert request.num_output_tokens == 80
    assert bool(worker.faults) is not on


@pytest.mark.parametrize(("asynchronous", "kept"), [(False, 1), (True, DRAFTS + 2)])
@pytest.mark.parametrize("forgetful", [True, False])
def test_the_end_of_the_context(maybe, gpu_rules, asynchronous, kept, forgetful):
    limit = 100
    found = []
    for on in (False, True):
        with maybe(on):
            for prompt in [*range(limit - 24, limit)]:
                _, worker, (request,), _ = serve(
                    [(prompt, 200)], max_model_len=limit, asynchronous=asynchronous, forgetful=forgetful, seed=prompt
                )
                found += [on] * bool(worker.faults)
                assert request.num_tokens == max(limit - kept * on, prompt + 1)
                assert request.get_finished_reason().name == "LENGTH"
    assert set(found) == {False}


def test_on_the_cpu_the_context_is_used_to_its_end(patched):
    with patched("hybrid_min_one_draft"):
        _, _, (request,), _ = serve([(50, 200)], max_model_len=100)
    assert request.num_tokens == 100


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize(("budget", "forgetful"), [(128, True), (129, False)])
def test_a_prompt_takes_no_room_from_a_decode_behind_it(maybe, on, budget, forgetful):
    """While 0 decodes, a chunk of 1 leaves room and 2 gets in behind it. When 0 is done, a chunk fills the step."""
    with maybe(on):
        for seed in range(3):
            _, worker, _, _ = serve(
                [(10, 14), (1200, 4), (20, 60)], budget=budget, caching=True, forgetful=forgetful, seed=seed
            )
            if worker.faults:
                break
    assert bool(worker.faults) is not on


@pytest.mark.parametrize("on", [False, True])
def test_no_more_requests_run_than_a_step_can_verify(maybe, on):
    with maybe(on):
        steps, worker, _, scheduler = serve([(4, 40)] * 16, budget=18, sequences=16)
    assert scheduler.max_num_running_reqs == (4 if on else 16)
    rows = [
        (name, len(step.scheduled_spec_decode_tokens.get(name, [])))
        for step in steps
        for name in step.num_scheduled_tokens
    ]
    assert {drafts for _, drafts in rows} == ({0, DRAFTS} if on else {0, 1, DRAFTS})
    assert not worker.faults


def test_a_step_too_small_for_one_block(patched):
    with patched("hybrid_min_one_draft"), pytest.raises(ValueError, match="--max-num-batched-tokens to 4 or more"):
        serve([(4, 4)], budget=3, sequences=1)


@pytest.mark.parametrize("on", [False, True])
def test_speculation_by_batch_size_keeps_a_draft(maybe, on):
    with maybe(on):
        steps, worker, _, _ = serve([(10, 90), (10, 30), (10, 60)], asynchronous=True, lengths=[(1, 2, 0), (3, 8, 3)])
    assert {step.num_spec_tokens_to_schedule for step in steps} == ({1, 3} if on else {0, 3})
    verified = {len(drafts) for step in steps for drafts in step.scheduled_spec_decode_tokens.values()}
    assert verified == ({1, 3} if on else {3})
    assert bool(worker.faults) is not on


def test_padding_counts_as_no_draft(patched):
    """Of the three that are verified in each step, one is no draft."""
    lengths = cycle([3, 2])
    with patched("hybrid_min_one_draft"):
        steps, _, _, _ = serve([(10, 40), (10, 40)], draft=lambda rng: [1] * next(lengths))
    verified = [step for step in steps if len(step.scheduled_spec_decode_tokens) == 2]
    assert len(verified) > 5
    for step in verified:
        assert step.scheduled_spec_decode_tokens == {"0": [1, 1, 1], "1": [1, 1, PAD]}
        assert step.num_invalid_spec_tokens == {"1": 1}


def test_other_models_are_left_alone(patched):
    with patched("hybrid_min_one_draft"):
        config = fixture.vllm_config(drafts=DRAFTS, caching=False, budget=18, sequences=16)
        groups = fixture.kv_cache_config(drafts=DRAFTS, caching=False)
        del groups.kv_cache_groups[1:]
        assert fixture.scheduler(config, groups).max_num_running_reqs == 16


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_why_a_row_needs_drafts(monkeypatch, count):
    """vLLM's GDN layer: after `count` accepted tokens a row with padding continues the text, one without drafts does
    so only when nothing but the first token was accepted."""
    gdn.use_triton_convolution(monkeypatch)
    layer = gdn.make_layer(DRAFTS, 8)
    builder = gdn.make_builder(DRAFTS)
    for drafts in (DRAFTS, -1):
        length = max(drafts, 0) + 1
        row = gdn.Row(length, 50, [1, 2, 3, 4], drafts=drafts, accepted=count)
        layer = gdn.make_layer(DRAFTS, 8)
        inputs = gdn.tokens(length)
        expected = gdn.reference(layer, *inputs, *gdn.history(layer, row))[0]
        right = torch.allclose(gdn.forward(layer, gdn.build(builder, [row]), *inputs)[0], expected, atol=1e-4)
        assert right is (drafts > 0 or count == 1)


def sampled(drafts, probabilities, draft_probs=None, uniform=0.5):
    """What vLLM's rejection kernel for sampled requests emits for one request."""
    import vllm._custom_ops  # noqa: F401  (loads the C++ kernels)
    import vllm.utils.cpu_triton_utils as kernels

    count = len(drafts)
    output = torch.full((1, count + 1), PAD, dtype=torch.int32)
    kernels.rejection_random_sample_kernel[(1,)](
        output,
        torch.tensor([count], dtype=torch.int32),
        torch.tensor(drafts, dtype=torch.int32),
        draft_probs,
        probabilities,
        torch.tensor([[5]], dtype=torch.int32),
        torch.tensor([6] * count, dtype=torch.int32),
        torch.full((count,), uniform, dtype=torch.float64),
        torch.tensor([False]),
        count,
        probabilities.shape[1],
        None,
        NO_DRAFT_PROBS=draft_probs is None,
        SYNTHETIC_MODE=False,
    )
    return output[0].tolist()


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("with_draft_probs", [False, True])
def test_the_cpu_rejects_padding(maybe, on, with_draft_probs):
    """The C++ kernel looks up token -1: the last of the row before, here a likely one.

    Token 0 is likely and was hardly ever drafted, so the ratio of its probabilities overflows.
    """
    target = torch.tensor([0.2, 0, 0, 0, 0, 0, 0, 0.8]).repeat(3, 1)
    draft = torch.tensor([1e-45, 0, 0, 0, 0, 0, 0, 1]).repeat(3, 1) if with_draft_probs else None
    with maybe(on):
        tokens = sampled([7, PAD, PAD], target, draft)
        assert tokens == ([7, 6, PAD, PAD] if on else [7, PAD, PAD, 5])
        assert sampled([7, 7, 7], target, draft) == [7, 7, 7, 5]


@pytest.mark.parametrize("greedy", [False, True])
def test_the_v1_kernels_reject_padding(greedy):
    """The Triton kernels, in the interpreter or on a GPU."""
    from vllm.v1.sample import rejection_sampler as kernels

    device = gdn.DEVICE
    target = torch.softmax(torch.randn(3, 8, generator=torch.Generator().manual_seed(0)), -1).to(device)
    output = torch.full((1, 4), PAD, dtype=torch.int32, device=device)
    counts = torch.tensor([3], dtype=torch.int32, device=device)
    drafts = torch.full((3,), PAD, dtype=torch.int32, device=device)
    bonus = torch.tensor([[5]], dtype=torch.int32, device=device)
    uniform = torch.zeros(3, dtype=torch.float64, device=device)
    if greedy:
        kernels.rejection_greedy_sample_kernel[(1,)](
            output, counts, drafts, target.argmax(-1), bonus, None, 3, uniform, None, SYNTHETIC_MODE=False
        )
        expected = int(target[0].argmax())
    else:
        recovered = torch.full((3,), 6, dtype=torch.int32, device=device)
        is_greedy = torch.tensor([False], device=device)
        kernels.rejection_random_sample_kernel[(1,)](
            output,
            counts,
            drafts,
            None,
            target,
            bonus,
            recovered,
            uniform,
            is_greedy,
            3,
            8,
            None,
            NO_DRAFT_PROBS=True,
            SYNTHETIC_MODE=False,
        )
        expected = 6
    assert output[0].tolist() == [expected, PAD, PAD, PAD]


def test_revert(patched):
    import vllm.utils.cpu_triton_utils as kernels
    from vllm.v1.core.sched.scheduler import Scheduler

    def names():
        return (
            Scheduler.__init__,
            Scheduler.schedule,
            Scheduler._update_request_with_output,
            kernels.rejection_random_sample_kernel,
        )

    stock = names()
    for _ in range(2):
        with patched("hybrid_min_one_draft"):
            assert not set(names()) & set(stock)
        assert names() == stock
