"""A prompt of one token: stock starts it from what lies in its state block, patched from nothing."""

from contextlib import nullcontext

import pytest
import torch

from tests.patches import gdn
from tests.patches import scheduler_fixture as fixture

DRAFTS = 3


@pytest.fixture
def maybe(patched):
    return lambda on: patched("no_draft_padding_for_new_prompts") if on else nullcontext()


def arrivals(prompts: list[list[int]], *, asynchronous=False, caching=False, **options):
    """Start one request, let it decode, and let prompts arrive; returns the steps from their arrival on."""
    config = fixture.vllm_config(drafts=DRAFTS, caching=caching, **options)
    groups = fixture.kv_cache_config(drafts=DRAFTS, caching=caching)
    scheduler = fixture.scheduler(config, groups, asynchronous=asynchronous)
    texts = {"old": list(range(100)), **{f"{i}": prompt + list(range(60)) for i, prompt in enumerate(prompts)}}
    worker = fixture.Worker(groups, texts, lambda: 1, placeholders=asynchronous)
    flying = []

    def step():
        output = scheduler.schedule()
        flying.append((output, worker.execute(output)))
        if len(flying) > asynchronous:
            fixture.update(scheduler, *flying.pop(0), lambda: [1] * DRAFTS)
        return output

    scheduler.add_request(fixture.request("old", range(10), 60, 64))
    for _ in range(4):
        step()
    for i, prompt in enumerate(prompts):
        scheduler.add_request(fixture.request(f"{i}", prompt, 20, scheduler.hash_block_size))
    steps = [step() for _ in range(6)]
    return steps, worker, scheduler


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("on", [False, True])
def test_a_new_prompt_of_one_token_gets_no_drafts(maybe, on, asynchronous):
    with maybe(on):
        steps, worker, scheduler = arrivals([[7]], asynchronous=asynchronous)
    first, second = steps[:2]
    assert (first.num_scheduled_tokens["0"], first.scheduled_spec_decode_tokens.get("0")) == (
        (1, None) if on else (1 + DRAFTS, [-1] * DRAFTS)
    )
    assert first.num_scheduled_tokens["old"] == second.num_scheduled_tokens["0"] == 1 + DRAFTS
    assert {step.num_spec_tokens_to_schedule for step in steps} == {DRAFTS}
    assert scheduler.dynamic_sd_lookup is None
    assert worker.faults == []


def test_what_follows_a_cached_prefix_is_padded_as_before(patched):
    prompt = list(range(200, 265))
    config = fixture.vllm_config(drafts=DRAFTS)
    groups = fixture.kv_cache_config(drafts=DRAFTS)
    # A drafter without keys of its own, for which a hit is not cut back by a block.
    groups.kv_cache_groups[0].is_eagle_group, groups.kv_cache_groups[1].is_eagle_group = False, True
    with patched("no_draft_padding_for_new_prompts"):
        scheduler = fixture.scheduler(config, groups)
        scheduler.use_eagle = False
        texts = {name: prompt + list(range(90)) for name in ("first", "again")} | {"old": list(range(100))}
        worker = fixture.Worker(groups, texts)
        fixture.run(scheduler, worker, [fixture.request("first", prompt, 8, 64)])
        scheduler.add_request(fixture.request("old", range(10), 60, 64))
        for _ in range(3):
            output = scheduler.schedule()
            fixture.update(scheduler, output, worker.execute(output), lambda: [1] * DRAFTS)
        scheduler.add_request(fixture.request("again", prompt, 8, 64))
        output = scheduler.schedule()
    assert output.scheduled_new_reqs[0].num_computed_tokens == 64
    assert output.scheduled_spec_decode_tokens["again"] == [-1] * DRAFTS


def batch(rows: list[gdn.Row], monkeypatch):
    """gdn.build, with what the runners add for rows that prefill."""
    shared = gdn.common(rows)
    shared.is_prefilling = torch.tensor([row.computed == 0 for row in rows])
    shared.seq_lens_cpu_upper_bound = torch.tensor([row.computed + row.tokens for row in rows])
    monkeypatch.setattr(gdn, "common", lambda _: shared)


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("others", [[], [gdn.Row(1 + DRAFTS, 50, [5, 6, 7, 8], drafts=DRAFTS, accepted=2)]])
@pytest.mark.parametrize("drafts", [DRAFTS, -1])
def test_the_layer_starts_from_nothing(maybe, monkeypatch, on, others, drafts):
    """vLLM's GDN layer. Padded, as stock schedules it, the row is wrong; unpadded it is right beside verified rows,
    and alone when its block is cleared."""
    gdn.use_triton_convolution(monkeypatch)
    new = gdn.Row(1 + max(drafts, 0), 0, [1, 2, 3, 4], drafts=drafts)
    rows = [*others, new]
    batch(rows, monkeypatch)
    layer = gdn.make_layer(DRAFTS, 10)
    inputs = gdn.tokens(sum(row.tokens for row in rows))
    tail = [part[-new.tokens :] for part in inputs]
    nothing = (torch.zeros(3, gdn.CONV_DIM), torch.zeros(gdn.VALUE_HEADS, gdn.HEAD_DIM, gdn.HEAD_DIM))
    expected = gdn.reference(layer, *tail, *(part.to(gdn.DEVICE) for part in nothing))
    before = [state.clone() for state in layer.kv_cache]
    with maybe(on):
        builder = gdn.make_builder(DRAFTS)
        builder.compilation_config.static_forward_context = {"layer": layer}
        metadata = gdn.build(builder, rows)
        for row in others:
            assert all(
                torch.equal(was[row.blocks], state[row.blocks])
                for was, state in zip(before, layer.kv_cache, strict=True)
            )
        out = gdn.forward(layer, metadata, *inputs)[-new.tokens :]
    right = drafts < 0 and (on or bool(others))
    assert torch.allclose(out[0], expected[0], atol=1e-4) is right


@pytest.mark.parametrize(
    ("tokens", "computed", "prefilling"), [(1, 1, True), (1, 64, True), (2, 0, True), (1, 0, False), (0, 1, True)]
)
def test_no_other_block_is_cleared(patched, tokens, computed, prefilling):
    """A tail after a hit, a longer prompt, a dummy run, a padding row."""
    rows = [gdn.Row(1, 9, [5, 6, 7, 8]), gdn.Row(tokens, computed, [1, 2, 3, 4])]
    shared = gdn.common(rows)
    shared.is_prefilling = torch.tensor([False, prefilling])
    shared.seq_lens_cpu_upper_bound = torch.tensor([10, tokens + computed])
    layer = gdn.make_layer(DRAFTS, 10)
    before = [state.clone() for state in layer.kv_cache]
    with patched("no_draft_padding_for_new_prompts"):
        builder = gdn.make_builder(DRAFTS)
        builder.compilation_config.static_forward_context = {"layer": layer}
        builder.build(0, shared, gdn.accepted(rows), torch.tensor([-1, -1], dtype=torch.int32))
    assert all(torch.equal(was, state) for was, state in zip(before, layer.kv_cache, strict=True))


def test_revert(patched):
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
    from vllm.v1.core.sched.scheduler import Scheduler

    def names():
        return Scheduler.schedule, GDNAttentionMetadataBuilder.__init__, GDNAttentionMetadataBuilder.build

    stock = names()
    for _ in range(2):
        with patched("no_draft_padding_for_new_prompts"):
            assert not set(names()) & set(stock)
        assert names() == stock
