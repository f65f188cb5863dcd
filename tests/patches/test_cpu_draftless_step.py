"""Requests on the CPU whose steps verify all drafts, some, or none, and which steps leave out, through vLLM's runner.

A request's GDN inputs are a fixed stream; rejected drafts are other inputs. Whatever the steps, the outputs for the
stream must be those of `gdn.reference`, a plain loop in float32 over the whole stream.
"""

import random
import re
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams, _custom_ops
from vllm.forward_context import ForwardContext, override_forward_context
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_input_batch import InputBatch

from tests.patches import gdn

DRAFTS = 3
ROWS = 6
CPU = torch.device("cpu")


@dataclass
class Row:
    """What a step does with a request: tokens of the stream that it must compute, drafts, and how many tokens of the
    step are accepted (the drafts that equal the stream, and one)."""

    drafts: int = DRAFTS
    accepted: int = 1
    prompt: int = 0

    @property
    def tokens(self):
        return self.prompt or 1 + self.drafts

    @property
    def kept(self):
        return self.prompt or self.accepted


@dataclass
class Request:
    number: int
    computed: int = 0
    outputs: list = field(default_factory=list)

    def __post_init__(self):
        self.stream = gdn.tokens(120, torch.bfloat16, seed=self.number)
        self.blocks = list(range(1 + self.number * (1 + DRAFTS), 1 + (self.number + 1) * (1 + DRAFTS)))


class Runner(CPUModelRunner):
    """vLLM's CPU runner with what the methods in use need: one group of GDN layers and a batch, no model."""

    def __init__(self):
        def buffer(size=ROWS):
            return CpuGpuBuffer(size, dtype=torch.int32, device=CPU, pin_memory=False)

        builder = gdn.make_builder(DRAFTS)
        group = KVCacheGroupSpec(["layer"], builder.kv_cache_spec)
        self.kv_cache_config = KVCacheConfig(100, [], [group])
        self.attn_groups = [[SimpleNamespace(get_metadata_builder=lambda _: builder, layer_names=["layer"])]]
        self.reorder_batch_threshold = builder.reorder_batch_threshold
        self.cache_config = SimpleNamespace(kv_sharing_fast_prefill=False, use_replayssm=False, mamba_cache_mode="none")
        self.model_config = SimpleNamespace(rswa_window=None, is_hybrid=True)
        self.speculative_config = SimpleNamespace(use_ngram_gpu=lambda: False)
        self.drafter = None
        self.device = CPU
        self.dcp_world_size, self.uses_xdrope_dim = 1, 0
        self.use_async_spec_decode = self.use_async_scheduling = False
        self.is_mm_prefix_lm = self.is_pooling_model = self.uses_mrope = self.routed_experts_initialized = False
        self.mamba_prev_last_scheduled_idx = None
        self.num_accepted_tokens_event = SimpleNamespace(record=lambda: None)
        self.late_interaction_runner = SimpleNamespace(
            register_request=lambda *_: None, on_requests_finished=lambda *_: None
        )
        self.requests, self.num_prompt_logprobs, self.encoder_cache = {}, {}, {}
        self.num_accepted_tokens, self.num_decode_draft_tokens = buffer(), buffer()
        self.query_start_loc = buffer(ROWS + 1)
        self.positions = torch.zeros(1024, dtype=torch.int64)
        self.input_batch = InputBatch(ROWS, 1024, 1024, CPU, 100, [1024], [1024], [1 + DRAFTS], num_spec_tokens=DRAFTS)
        self._postprocess_tensors()


class Engine:
    """Steps of a runner and one layer over requests' streams; the scheduler is the test."""

    def __init__(self, amx: bool):
        self.runner = Runner()
        self.plain = gdn.make_layer(DRAFTS, 1 + ROWS * (1 + DRAFTS), torch.bfloat16)
        self.plain.dt_bias.data = self.plain.dt_bias.data.bfloat16()
        self.layer = gdn.make_layer(DRAFTS, 1 + ROWS * (1 + DRAFTS), torch.bfloat16)
        self.layer.dt_bias.data = self.plain.dt_bias.data
        if amx:
            weight = self.layer.conv1d.weight.data.squeeze(1)
            self.layer.conv1d._cpu_unpacked_conv_weight = weight
            self.layer.conv1d.weight.data = _custom_ops.causal_conv1d_weight_pack(weight)
        self.requests: dict[str, Request] = {}
        self.rejected = gdn.tokens(500, torch.bfloat16, seed=99)

    def step(self, **rows: Row) -> None:
        """Run the named requests; a name not seen before is a new request."""
        output = self._schedule(rows)
        self.runner._update_states(output)
        self.runner.input_batch.block_table.commit_block_table(len(rows))
        names = self.runner.input_batch.req_ids
        starts = self._prepare_inputs([rows[name] for name in names], names)
        metadata, _ = self.runner._build_attention_metadata(
            num_tokens=starts[-1],
            num_reqs=len(names),
            max_query_len=max(row.tokens for row in rows.values()),
            use_spec_decode=bool(output.scheduled_spec_decode_tokens),
            slot_mappings={0: torch.zeros(starts[-1], dtype=torch.int64)},
        )
        inputs = [self._inputs(name, rows[name]) for name in names]
        inputs = [torch.cat(parts) for parts in zip(*inputs, strict=True)]
        out = torch.zeros(starts[-1], gdn.VALUE_HEADS, gdn.HEAD_DIM, dtype=torch.bfloat16)
        context = ForwardContext(no_compile_layers={"layer": self.layer}, attn_metadata=metadata, slot_mapping={})
        with override_forward_context(context):
            gdn_attention.cpu_gdn_attention_core(*inputs, out, "layer")
        sampled = torch.full((len(names), 1 + DRAFTS), -1)
        for i, name in enumerate(names):
            request, kept = self.requests[name], rows[name].kept
            request.outputs.append(out[starts[i] : starts[i] + kept])
            request.computed += kept
            sampled[i, : rows[name].accepted] = 0
        self.runner._update_states_after_model_execute(sampled, output)

    def preempted(self, name: str) -> None:
        """The request has lost its blocks; its next step computes all of its tokens again."""
        self.requests[name].computed = 0
        self.requests[name].outputs.clear()

    def error(self, name: str) -> float:
        """The greatest difference between a request's outputs and the reference's."""
        request = self.requests[name]
        stream = [part[: request.computed] for part in request.stream]
        history = torch.zeros(gdn.WIDTH - 1, gdn.CONV_DIM, dtype=torch.bfloat16)
        state = torch.zeros(gdn.VALUE_HEADS, gdn.HEAD_DIM, gdn.HEAD_DIM)
        expected = gdn.reference(self.plain, *stream, history, state)
        return float((torch.cat(request.outputs).float() - expected).abs().max())

    def _schedule(self, rows) -> SchedulerOutput:
        new, cached = [], CachedRequestData.make_empty()
        for name, row in rows.items():
            if name not in self.requests:
                request = self.requests[name] = Request(len(self.requests))
                new.append(
                    NewRequestData(name, [0] * row.prompt, [], SamplingParams(), None, (request.blocks,), 0, None)
                )
                continue
            request = self.requests[name]
            resumed = request.computed == 0
            if resumed:
                cached.resumed_req_ids.add(name)
            cached.req_ids.append(name)
            cached.new_block_ids.append((request.blocks,) if resumed else None)
            cached.num_computed_tokens.append(request.computed)
            cached.num_output_tokens.append(0)
        return SchedulerOutput(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={name: row.tokens for name, row in rows.items()},
            total_num_scheduled_tokens=sum(row.tokens for row in rows.values()),
            scheduled_spec_decode_tokens={
                name: [0] * row.drafts for name, row in rows.items() if row.drafts and not row.prompt
            },
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=[0],
            finished_req_ids=set(),
            free_encoder_mm_hashes=[],
        )

    def _prepare_inputs(self, rows, names) -> list[int]:
        """What the runner's own method leaves in its buffers; returns where each row starts."""
        runner, count = self.runner, len(rows)
        runner.num_accepted_tokens.np[:count] = runner.input_batch.num_accepted_tokens_cpu[:count]
        if any(row.drafts and not row.prompt for row in rows):
            drafts = [row.drafts if row.drafts and not row.prompt else -1 for row in rows]
            runner.num_decode_draft_tokens.np[:count] = drafts
        starts = torch.tensor([0, *(row.tokens for row in rows)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        runner.query_start_loc.cpu[: count + 1] = starts
        computed = torch.tensor([self.requests[name].computed for name in names], dtype=torch.int32)
        runner.seq_lens = runner.optimistic_seq_lens_cpu = computed + starts.diff()
        return starts.tolist()

    def _inputs(self, name, row):
        request = self.requests[name]
        for stream, rejected in zip(request.stream, self.rejected, strict=True):
            wrong = rejected[request.computed :][: row.tokens - row.kept]
            yield torch.cat([stream[request.computed :][: row.kept], wrong])


@pytest.fixture(params=["torch", "amx"])
def engine(request, monkeypatch):
    """Makes engines whose convolutions are PyTorch's or the CPU's native ones."""
    if request.param == "amx" and not torch.cpu._is_amx_tile_supported():
        pytest.skip("needs a CPU with AMX")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: request.param == "amx")
    # The CPU's chunked recurrence takes heads of 64 and 128 only.
    monkeypatch.setattr(gdn, "HEAD_DIM", 64)
    monkeypatch.setattr(gdn, "CONV_DIM", (2 * gdn.KEY_HEADS + gdn.VALUE_HEADS) * 64)
    monkeypatch.setattr(gpu_model_runner, "get_pp_group", lambda: SimpleNamespace(is_last_rank=True))
    return lambda: Engine(request.param == "amx")


def new(prompt=9):
    return Row(prompt=prompt)


SCHEDULES = {
    "no draft at the first step": [{"x": new()}, {"x": Row(0)}, {"x": Row()}],
    "no draft after accepted ones": [{"x": new()}, {"x": Row(accepted=3)}, {"x": Row(0)}, {"x": Row()}],
    "one draft after accepted ones": [{"x": new()}, {"x": Row(accepted=4)}, {"x": Row(1, 2)}, {"x": Row(accepted=2)}],
    "two drafts, one accepted": [{"x": new()}, {"x": Row(accepted=2)}, {"x": Row(2, 2)}, {"x": Row()}, {"x": Row()}],
    "fewer drafts again and again": [
        {"x": new()},
        {"x": Row(accepted=4)},
        {"x": Row(2, 3)},
        {"x": Row(1, 1)},
        {"x": Row(2, 2)},
        {"x": Row(0)},
        {"x": Row(0)},
        {"x": Row(accepted=3)},
    ],
    "all lengths in a batch": [
        {"w": new(3), "x": new(), "y": new(20), "z": new(70)},
        {"w": Row(accepted=3), "x": Row(accepted=2), "y": Row(accepted=4), "z": Row(accepted=3)},
        {"w": Row(), "x": Row(2, 2), "y": Row(1), "z": Row(0)},
        {"w": Row(0), "x": Row(1), "y": Row(), "z": Row(2)},
        {"w": Row(), "x": Row(), "y": Row(), "z": Row()},
    ],
    "no draft beside a prompt": [
        {"x": new(), "y": new(5)},
        {"x": Row(accepted=3), "y": Row(accepted=1)},
        {"x": Row(0), "y": Row(0), "z": new(30)},
        {"x": Row(), "y": Row(), "z": Row()},
    ],
    "left out of a step": [
        {"x": new(), "y": new(5)},
        {"x": Row(accepted=3), "y": Row(accepted=2)},
        {"y": Row(accepted=2)},
        {"x": Row(accepted=2), "y": Row()},
    ],
    "left out of two steps, back in another row and without drafts": [
        {"x": new(), "y": new(5)},
        {"x": Row(accepted=4), "y": Row(accepted=2)},
        {"z": new(11)},
        {"z": Row(accepted=3), "y": Row(accepted=3)},
        {"z": Row(1), "y": Row(), "x": Row(0)},
        {"z": Row(), "y": Row(), "x": Row()},
    ],
}


def greatest_error(engine, schedule):
    """Over all requests; infinite if vLLM raises an error."""
    try:
        for rows in schedule:
            engine.step(**rows)
    except RuntimeError as error:
        assert re.search("must be contiguous|must match the size|must be in .1, seqlen", str(error))
        return float("inf")
    return max(engine.error(name) for name in engine.requests)


RIGHT, WRONG = 0.003, 0.01  # The outputs' bfloat16 error is below 0.0015; an output's size is about 0.1.


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_a_short_step_goes_on_from_the_last_accepted_token(schedule, engine, patched):
    assert greatest_error(engine(), schedule) > WRONG
    with patched("cpu_draftless_step"):
        assert greatest_error(engine(), schedule) < RIGHT


def test_full_blocks_are_right_with_and_without(engine, patched):
    schedule = [{"x": new(), "y": new(30)}]
    schedule += [{"x": Row(accepted=a), "y": Row(accepted=5 - a)} for a in (1, 2, 4, 3, 1)]
    assert greatest_error(engine(), schedule) < RIGHT
    with patched("cpu_draftless_step"):
        assert greatest_error(engine(), schedule) < RIGHT


def test_requests_that_join_pause_and_verify_blocks_of_any_length(engine, patched):
    generator = random.Random(1)
    schedule, seen = [], []
    for step in range(30):
        rows = {}
        for name in seen:
            drafts = generator.randrange(DRAFTS + 1)
            if generator.random() < 0.8:
                rows[name] = Row(drafts, generator.randrange(1, drafts + 2))
        if step % 6 == 0:
            seen.append(f"r{step}")
            rows[seen[-1]] = new(generator.choice([2, 7, 64]))
        if rows:
            schedule.append(rows)
    with patched("cpu_draftless_step"):
        assert greatest_error(engine(), schedule) < RIGHT


def test_a_preempted_request_starts_afresh(engine, patched):
    with patched("cpu_draftless_step"):
        running = engine()
        running.step(x=new(), y=new(5))
        running.step(x=Row(accepted=4), y=Row(accepted=2))
        running.step(y=Row())
        running.preempted("x")
        running.step(x=new(13), y=Row())
        running.step(x=Row(accepted=2), y=Row())
        assert max(running.error("x"), running.error("y")) < RIGHT


def test_revert_restores_vllm(patched):
    places = [(_custom_ops, "fused_sigmoid_gating_delta_rule_update_cpu"), (gdn_attention, "_spec_forward")]
    places += [(CPUModelRunner, "_build_attention_metadata"), (CPUModelRunner, "_update_states")]
    stock = [getattr(owner, name) for owner, name in places]
    for _ in range(2):
        with patched("cpu_draftless_step"):
            assert all(
                getattr(owner, name).__wrapped__ is before for (owner, name), before in zip(places, stock, strict=True)
            )
        assert [getattr(owner, name) for owner, name in places] == stock
    assert "_update_states" not in vars(CPUModelRunner)
