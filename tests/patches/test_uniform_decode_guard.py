"""Which steps replay a captured verify graph, through vLLM's scheduler, runners' step preludes and dispatchers."""

import json
from collections import deque
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from tests.patches import gdn

K = 3
BUDGET = 64  # tokens a step
CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="builds the CPU runner; tests/gpu has the real thing")


class Stop(Exception):
    """Ends a runner's step once it has chosen how to run."""


class NoBuffers:
    """Where a V2 dummy run goes after its choice."""

    @property
    def device(self):
        raise Stop


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The configuration of a tiny Qwen3.5-type model with MTP and K drafts, without weights."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.engine.arg_utils import EngineArgs

    path = tmp_path_factory.mktemp("model")
    text = dict(
        model_type="qwen3_5_text", vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=16, linear_value_head_dim=16, linear_conv_kernel_dim=4, full_attention_interval=4,
        max_position_embeddings=8192, mtp_num_hidden_layers=1,
        rope_parameters=dict(rope_type="default", rope_theta=1e7),
    )  # fmt: skip
    architecture = dict(architectures=["Qwen3_5ForConditionalGeneration"], model_type="qwen3_5", dtype="bfloat16")
    vision = dict(depth=1, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=64)
    (path / "config.json").write_text(json.dumps(dict(architecture, text_config=text, vision_config=vision)))
    config = EngineArgs(
        model=str(path), skip_tokenizer_init=True, max_model_len=1024, max_num_seqs=8, max_num_batched_tokens=BUDGET,
        enforce_eager=True, mamba_ssm_cache_dtype="float32", enable_prefix_caching=False, language_model_only=True,
        speculative_config={"method": "mtp", "num_speculative_tokens": K},
    ).create_engine_config()  # fmt: skip
    config.cache_config.num_gpu_blocks = 100
    config.compilation_config.cudagraph_capture_sizes = [1, 2, 4, 8, 16, 32]
    config.compilation_config.max_cudagraph_capture_size = 32
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{path}/rendezvous", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        yield config
    cleanup_dist_env_and_memory()


@pytest.fixture(scope="module")
def kv_cache(config):
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec

    attention = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=16, dtype=torch.bfloat16)
    mamba = MambaSpec(1024, ((3, 6), (4, 16, 16)), (torch.bfloat16, torch.float32), num_speculative_blocks=K)
    groups = [KVCacheGroupSpec(["attention"], attention), KVCacheGroupSpec(["gdn"], mamba)]
    return KVCacheConfig(num_blocks=100, kv_cache_tensors=[], kv_cache_groups=groups)


class V1:
    """vLLM's V1 runner up to the choice of how to run a step."""

    def __init__(self, config, kv_cache, asynchronous):
        from vllm.config import CUDAGraphMode
        from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        self.runner = runner = CPUModelRunner(config, CPU)
        runner.kv_cache_config, runner.attn_groups, runner.uses_mrope = kv_cache, [[], []], False
        runner.use_async_scheduling = runner.use_async_spec_decode = asynchronous
        runner.may_reinitialize_input_batch(kv_cache, [16, 1024])
        runner.cudagraph_dispatcher = CudagraphDispatcher(config)
        runner.cudagraph_dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_AND_PIECEWISE, K + 1)
        runner._get_slot_mappings = MagicMock(side_effect=Stop)

    def mode(self, scheduler_output):
        dispatcher = self.runner.cudagraph_dispatcher
        chosen, dispatch = [], dispatcher.dispatch
        dispatcher.dispatch = lambda **kwargs: chosen.append(dispatch(**kwargs)) or chosen[-1]
        with pytest.raises(Stop):
            self.runner.execute_model(scheduler_output)
        dispatcher.dispatch = dispatch
        return chosen[-1][0].name

    def dummy_mode(self, uniform):
        """As `_dummy_run` asks for a batch of two requests of K+1 tokens."""
        args = dict(num_tokens=8, num_reqs=2, num_scheduled_tokens_np=np.array([4, 4]), max_num_scheduled_tokens=4)
        mode, *_ = self.runner._determine_batch_execution_and_padding(
            **args, use_cascade_attn=False, force_uniform_decode=uniform
        )
        return mode.name


class V2:
    """vLLM's V2 runner up to the choice of how to run a step."""

    def __init__(self, config, kv_cache, asynchronous):
        from vllm.config import CUDAGraphMode
        from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner
        from vllm.v1.worker.gpu.states import RequestState

        del asynchronous  # this runner is the same either way
        self.runner = runner = GPUModelRunner.__new__(GPUModelRunner)
        manager = ModelCudaGraphManager(config, CPU, CUDAGraphMode.FULL_AND_PIECEWISE, K + 1)
        manager._graphs_captured = True
        vars(runner).update(
            req_states=RequestState(8, 1024, BUDGET, K, 128, CPU), cudagraph_manager=manager, dp_size=1, dp_rank=0,
            model_state=MagicMock(num_new_sampled_tokens_per_step=1), block_tables=MagicMock(), lora_state=MagicMock(),
            kv_connector=MagicMock(), pp_handler=None, pooling_runner=None, encoder_cache=None, sampler=None,
            prompt_logprobs_worker=None, lora_config=None, is_last_pp_rank=False, is_encoder_decoder=False,
            kv_block_zeroer=MagicMock(), input_buffers=NoBuffers(),
            prepare_inputs=MagicMock(side_effect=Stop),
        )  # fmt: skip

    def mode(self, scheduler_output, **kwargs):
        chosen, dispatch = [], self.runner.cudagraph_manager.dispatch
        self.runner.cudagraph_manager.dispatch = lambda *a, **kw: chosen.append(dispatch(*a, **kw)) or chosen[-1]
        with pytest.raises(Stop):
            self.runner.execute_model(scheduler_output, **kwargs)
        self.runner.cudagraph_manager.dispatch = dispatch
        return chosen[-1].cg_mode.name

    def dummy_mode(self, uniform):
        lengths = {"x": 4, "y": 4} if uniform else {"x": 5, "y": 3}
        output = SimpleNamespace(num_scheduled_tokens=lengths, total_num_scheduled_tokens=8)
        return self.mode(output, dummy_run=True)


@pytest.fixture(params=[(V1, 0), (V1, 1), (V2, 0), (V2, 1)], ids=["V1", "V1 async", "V2", "V2 async"])
def make_server(request, config, kv_cache, monkeypatch):
    """Makes an engine: a fresh scheduler in front of a fresh runner."""
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu import buffer_utils

    runner, lag = request.param
    monkeypatch.setattr(type(current_platform), "get_global_graph_pool", lambda self: object(), raising=False)
    monkeypatch.setattr(buffer_utils, "UvaBuffer", HostBuffer)
    return lambda: Server(config, kv_cache, runner(config, kv_cache, bool(lag)), lag)


class HostBuffer:
    def __init__(self, size, dtype):
        self.cpu = self.uva = torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()


class Server:
    """An engine whose model emits token 7 and whose drafts are all rejected; lag 1 schedules a step ahead."""

    def __init__(self, config, kv_cache, runner, lag):
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        kind = AsyncScheduler if lag else Scheduler
        self.runner, self.lag, self.pending = runner, lag, deque()
        self.scheduler = kind(config, kv_cache, StructuredOutputManager(config), block_size=1024, hash_block_size=16)
        self.scheduler.use_v2_model_runner = isinstance(runner, V2)

    def add(self, name, prompt_length):
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        params = SamplingParams(max_tokens=200, ignore_eos=True)
        self.scheduler.add_request(Request(name, [5] * prompt_length, params, None))

    def step(self):
        """One step: the lengths it schedules, and the mode it runs in."""
        output = self.scheduler.schedule()
        mode = self.runner.mode(output)
        self.pending.append((output, [r for r in output.num_scheduled_tokens if self.prompt_done(r)]))
        if len(self.pending) > self.lag:
            self.answer(*self.pending.popleft())
        return list(output.num_scheduled_tokens.values()), mode

    def prompt_done(self, name):
        return not self.scheduler.requests[name].is_prefill_chunk

    def answer(self, output, emitting):
        from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

        names = list(output.num_scheduled_tokens)
        tokens = [[7] if name in emitting else [] for name in names]
        index = {name: i for i, name in enumerate(names)}
        self.scheduler.update_from_output(output, ModelRunnerOutput(names, index, tokens))
        if not self.lag:
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, [[1] * K for _ in names]))
        if isinstance(self.runner, V1):
            for name in emitting:
                self.runner.runner.requests[name].output_token_ids.append(7)


def modes_of(server, prompt_length, steps):
    server.add("a", prompt_length)
    return [server.step() for _ in range(steps)]


def test_prompt_lengths(make_server, patched):
    """Prompts of 1 to 12 tokens, each alone: only K+1 was taken for a decode. Decodes are FULL before and after."""
    lengths = range(1, 13)
    stock = {n: modes_of(make_server(), n, 3) for n in lengths}
    assert [n for n in lengths if stock[n][0] == ([n], "FULL")] == [K + 1]
    with patched("uniform_decode_guard"):
        guarded = {n: modes_of(make_server(), n, 3) for n in lengths}
    for n in lengths:
        assert guarded[n] == [([n], "PIECEWISE"), *stock[n][1:]]
        assert guarded[n][1:] == [([K + 1], "FULL")] * 2


def last_chunk(server):
    return modes_of(server, BUDGET + K + 1, 2)[-1]


def beside_a_decode(server):
    modes_of(server, 9, 3)
    server.add("b", K + 1)
    return server.step()


def one_token_prompt_beside_a_decode(server):
    modes_of(server, 9, 3)
    server.add("b", 1)  # the scheduler pads it to K+1 tokens with drafts that do not exist
    return server.step()


def resumed(server):
    """A request with a short prompt, preempted when prompt and output together end in a chunk of K+1 tokens."""
    modes_of(server, 9, 2)
    request = server.scheduler.requests["a"]
    while request.num_tokens + len(server.pending) < BUDGET + K + 1:
        server.step()
    while server.pending:
        server.answer(*server.pending.popleft())
    server.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert server.step()[0] == [BUDGET]
    return server.step()


@pytest.mark.parametrize("scene", [last_chunk, beside_a_decode, one_token_prompt_beside_a_decode, resumed])
def test_chunks_that_look_like_decodes(make_server, patched, scene):
    lengths, mode = scene(make_server())
    assert set(lengths) == {K + 1}
    assert mode == "FULL", "stock 0.27.1 no longer takes it for a decode"
    with patched("uniform_decode_guard"):
        server = make_server()
        assert scene(server) == (lengths, "PIECEWISE")
        assert server.step() == (lengths, "FULL"), "the next step decodes"


def test_dummy_and_capture_runs_decide_as_before(make_server, patched):
    server = make_server()
    stock = [server.runner.dummy_mode(uniform) for uniform in (True, False)]
    assert stock == ["FULL", "PIECEWISE"]
    with patched("uniform_decode_guard"):
        server = make_server()
        modes_of(server, K + 1, 1)
        assert [server.runner.dummy_mode(uniform) for uniform in (True, False)] == stock


@pytest.mark.parametrize("make_server", [(V2, 0)], indirect=True)
def test_draft_prefill_follows_the_target(make_server, patched):
    """The MTP speculators replay a captured draft prefill only in a step in which the target replays."""
    from vllm.v1.worker.gpu.spec_decode.autoregressive import speculator
    from vllm.v1.worker.gpu.spec_decode.multi_module_mtp import speculator as multi

    def counts():
        return {module.get_uniform_token_count(1, K + 1, K + 1) for module in (speculator, multi)}

    with patched("uniform_decode_guard"):
        server = make_server()
        server.add("a", K + 1)
        assert server.step()[1] == "PIECEWISE"
        assert counts() == {None}
        assert server.step()[1] == "FULL"
        assert counts() == {K + 1}
    assert counts() == {K + 1}


def test_a_wrong_replay_cannot_write_foreign_state(patched, monkeypatch):
    """The belt: a captured step replayed for a prefill, as stock does, with the buffers as the builder leaves them."""
    gdn.use_triton_convolution(monkeypatch)
    decode = gdn.Row(K + 1, 40, [1, 2, 3, 4], drafts=K, accepted=2)
    prompt = gdn.Row(K + 1, 0, [5, 6, 7, 8])

    def blocks_written_by_replay():
        layer, builder = gdn.make_layer(K, blocks=9), gdn.make_builder(K, full_graphs=True)
        captured = builder.build_for_cudagraph_capture(gdn.common([decode]))
        gdn.build(builder, [decode])
        gdn.build(builder, [prompt])
        before = [cache.clone() for cache in layer.kv_cache]
        gdn.forward(layer, captured, *gdn.tokens(K + 1))
        changed = [(cache != old).flatten(1).any(1) for cache, old in zip(layer.kv_cache, before, strict=True)]
        return torch.stack(changed).any(0).nonzero().flatten().tolist()

    assert blocks_written_by_replay() == decode.blocks
    with patched("uniform_decode_guard"):
        assert blocks_written_by_replay() == []


def test_belt_leaves_decodes_and_mixed_batches_alone(patched):
    builder = gdn.make_builder(K, full_graphs=True)
    decode = gdn.Row(K + 1, 40, [1, 2, 3, 4], drafts=K)
    prompt = gdn.Row(7, 0, [5, 6, 7, 8])
    with patched("uniform_decode_guard"):
        assert gdn.build(builder, [decode]).spec_state_indices_tensor.tolist() == [decode.blocks]
        assert builder.spec_state_indices_tensor[0].tolist() == decode.blocks
        assert gdn.build(builder, [decode, prompt]).spec_state_indices_tensor.tolist() == [decode.blocks]
        assert not builder.spec_state_indices_tensor.any()
