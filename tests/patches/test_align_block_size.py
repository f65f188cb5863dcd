"""Chunks, resumed states and hashes in the mamba group's own block: stock poisons the prefix cache, patched never."""

import random
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from qwen38_3090.patches import align_block_size

from tests.patches import scheduler_fixture as fixture

BUDGETS = [(2048,), (1748, 2048, 300)]


@pytest.fixture
def maybe(patched):
    return lambda on: patched("align_block_size") if on else nullcontext()


def engine(*, block=64, window_block=0, unit=None, drafts=0, budget=2048, max_model_len=20000, **options):
    """A scheduler whose cache_config counts in `unit`, as it does after a server on the CPU has started."""
    config = fixture.vllm_config(drafts=drafts, budget=budget, max_model_len=max_model_len)
    groups = fixture.kv_cache_config(drafts=drafts, block=block, window_block=window_block)
    scheduler = fixture.scheduler(config, groups, **options)
    config.cache_config.block_size = unit or config.cache_config.block_size
    return scheduler, groups


def poisoned(scheduler, block: int, budgets, prompt: int, start: int) -> list[tuple[int, int]]:
    """(true position, position it is cached for) of the states that chunks of `prompt` tokens from `start` on leave.

    A chunk that ends at e leaves its state in column ceil(e / block) - 1; column i is cached when e passes its end.
    """
    request = fixture.request("r", [7] * prompt, 1, scheduler.hash_block_size)
    request.num_computed_tokens = start
    columns, wrong, turn, idle = {}, set(), 0, 0
    while request.num_computed_tokens < prompt:
        want = min(budgets[turn % len(budgets)], prompt - request.num_computed_tokens)
        turn += 1
        chunk = scheduler._mamba_block_aligned_split(request, want)
        idle = 0 if chunk else idle + 1
        assert idle < 2 * len(budgets), "no progress"
        end = request.num_computed_tokens = request.num_computed_tokens + chunk
        columns[-(-end // block) - 1] = end
        wrong |= {(at, (i + 1) * block) for i, at in columns.items() if end >= (i + 1) * block != at}
    return sorted(wrong)


@pytest.mark.parametrize("start", [0, 1, 2])
@pytest.mark.parametrize("budgets", BUDGETS)
@pytest.mark.parametrize(
    ("block", "unit"), [(2176, 2176), (2176, 128), (1600, 1584), (256, 128), (864, 864), (448, 448), (448, 16)]
)
def test_no_chunk_leaves_a_state_under_another_position(maybe, block, unit, budgets, start):
    scheduler, _ = engine(block=block, unit=unit)
    with maybe(True):
        assert poisoned(scheduler, block, budgets, 9000, start * block) == []
    with maybe(True):
        scheduler.use_eagle = True
        assert poisoned(scheduler, block, budgets, 9001, start * block) == []


@pytest.mark.parametrize(("block", "unit"), [(2176, 128), (1600, 1584), (256, 128)])
def test_stock_chunks_do(block, unit):
    scheduler, _ = engine(block=block, unit=unit)
    found = [poisoned(scheduler, block, budgets, 9000, 0) for budgets in BUDGETS]
    assert any(found), found
    if block == 2176:
        assert found[0] == [(2048, 2176), (4096, 4352), (6144, 6528), (8192, 8704)]


def conversations(scheduler, groups, *, drafts, seed, asynchronous=False, count=24, seed_block=0):
    """Run follow-ups and prompts with shared prefixes; returns (tokens from the cache, faults of the worker)."""
    rng = random.Random(seed)
    shared = [rng.randrange(100) for _ in range(600)]
    texts, requests = {}, []
    for i in range(count):
        history = texts[rng.choice(list(texts))] if i % 3 == 2 else shared
        common = rng.randrange(500)
        texts[f"{i}"] = text = history[:common] + [rng.randrange(100) for _ in range(600)]
        length = common + rng.randrange(1, 200)
        requests.append(fixture.request(f"{i}", text[:length], rng.randrange(1, 120), scheduler.hash_block_size))
    worker = fixture.Worker(
        groups, texts, lambda: rng.randrange(drafts + 1), placeholders=asynchronous, seed_block=seed_block
    )
    outputs = []
    for i in range(0, count, 4):
        outputs += fixture.run(scheduler, worker, requests[i : i + 4])
    cached = sum(data.num_computed_tokens for output in outputs for data in output.scheduled_new_reqs)
    return cached, worker.faults


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize(("block", "window_block"), [(64, 0), (64, 16), (68, 4), (64, 64)])
def test_every_hit_continues_from_the_state_of_its_text(patched, block, window_block, drafts, asynchronous):
    with patched("align_block_size"):
        for seed in range(2):
            scheduler, groups = engine(
                block=block, window_block=window_block, drafts=drafts, budget=256, asynchronous=asynchronous
            )
            cached, faults = conversations(scheduler, groups, drafts=drafts, seed=seed, asynchronous=asynchronous)
            assert cached > 1000 and faults == []


@pytest.mark.parametrize("on", [False, True])
def test_a_server_that_counts_in_another_unit(maybe, on):
    """What `VllmConfig.__post_init__`, run once more, does to a server on the CPU: M = 256, unit 128."""
    with maybe(on):
        found = []
        for seed in range(4):
            scheduler, groups = engine(block=64, unit=32, drafts=3, budget=200)
            found += conversations(scheduler, groups, drafts=3, seed=seed)[1]
        assert bool(found) is not on, found


@pytest.mark.parametrize(("on", "tokens"), [(False, [0, 0, 1280]), (True, [0, 1280, 1280])])
def test_the_second_request_hits_already(maybe, on, tokens):
    """A prompt of 1,500 tokens, three times, on a server on the CPU without --block-size."""
    with maybe(on):
        scheduler, groups = engine(block=256, unit=128, budget=2048)
        text = list(range(100)) * 16
        worker = fixture.Worker(groups, {name: text for name in "abc"})
        cached = []
        for name in "abc":
            output, *_ = fixture.run(scheduler, worker, [fixture.request(name, text[:1500], 1, 256)])
            cached.append(output.scheduled_new_reqs[0].num_computed_tokens)
        assert cached == tokens


@pytest.mark.parametrize(
    ("block", "window_block", "unit"),
    [(64, 0, 64), (64, 64, 64), (64, 16, 16), (2176, 128, 128)],
)
def test_a_window_of_smaller_blocks_gets_its_own_as_the_hash_unit(patched, block, window_block, unit):
    if window_block not in (0, block):
        with pytest.raises(AssertionError, match="divisible by hash_block_size"):
            engine(block=block, window_block=window_block)
    with patched("align_block_size"):
        scheduler, _ = engine(block=block, window_block=window_block)
        assert scheduler.hash_block_size == unit
        assert scheduler.block_size == block


def test_a_window_that_cannot_be_matched_still_stops_the_start(patched):
    """1,584 is no divisor of 1,600: lookups by their common divisor would fail at the first request."""
    with patched("align_block_size"), pytest.raises(AssertionError, match="divisible by hash_block_size"):
        engine(block=1600, window_block=1584)


@pytest.mark.parametrize("on", [False, True])
def test_a_resumed_request_reads_the_state_of_its_hit(maybe, on):
    """The V2 runner's own class and kernels: mamba block 64, a drafter's window of 16, a hit of three blocks."""
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_copy_spec, get_temporal_copy_spec
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

    config = fixture.vllm_config(drafts=3)
    groups = fixture.kv_cache_config(drafts=3, block=64, window_block=16)
    config.cache_config.block_size, config.cache_config.mamba_block_size = 16, 64
    model = torch.nn.Module()
    model.get_mamba_state_copy_func = lambda: (get_conv_copy_spec, get_temporal_copy_spec)
    layers = {
        name: SimpleNamespace(kv_cache=[torch.randn(20, 6, 128), torch.randn(20, 2, 32, 32)])
        for name in ("gdn.0", "gdn.1")
    }
    config.compilation_config.static_forward_context.update(layers)
    tables = torch.zeros(4, 2, 100, dtype=torch.int32)
    tables[:, 0, :8] = torch.arange(1, 9)
    with maybe(on):
        state = MambaHybridModelState(config, model, None, torch.device("cpu"))
        state.add_request(0, SimpleNamespace(num_computed_tokens=192))
        batch = SimpleNamespace(
            num_reqs=1, idx_mapping=torch.tensor([0]), query_start_loc=torch.tensor([0, 10], dtype=torch.int32)
        )
        state.preprocess_state(batch, tuple(tables), groups, torch.tensor([192]))
    for layer in layers.values():
        for tensor in layer.kv_cache:
            # Column 2 (block 3) holds the state after 192 tokens, column 3 (block 4) is the one to run in.
            assert torch.equal(tensor[3], tensor[4]) is on


@pytest.mark.parametrize("on", [False, True])
def test_a_prompt_advances_while_others_decode(maybe, on):
    """A step of 64 tokens, blocks of 64 and a decode that takes 4 of each step."""
    with maybe(on):
        scheduler, groups = engine(block=64, drafts=3, budget=64)
        texts = {"a": list(range(120)), "b": list(range(100, 320))}
        worker = fixture.Worker(groups, texts, lambda: 1)
        requests = [fixture.request("a", texts["a"][:10], 100, 64), fixture.request("b", texts["b"][:200], 1, 64)]
        outputs = fixture.run(scheduler, worker, requests)
    together = [output.num_scheduled_tokens for output in outputs if len(output.num_scheduled_tokens) == 2]
    assert [step["b"] for step in together][:5] == ([54, 10, 60, 4, 60] if on else [])
    assert worker.faults == []


def test_revert(patched):
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import core
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

    def names():
        return (
            Scheduler._mamba_block_aligned_split,
            MambaHybridModelState.add_request,
            kv_cache_utils.resolve_kv_cache_block_sizes,
            core.resolve_kv_cache_block_sizes,
        )

    stock = names()
    for _ in range(2):
        with patched("align_block_size"):
            assert not set(names()) & set(stock)
            assert core.resolve_kv_cache_block_sizes is kv_cache_utils.resolve_kv_cache_block_sizes
        assert names() == stock
    assert align_block_size.PATCH.name == "align_block_size"
