"""One vLLM engine in this process, driven step by step, for the exactness experiments.

`Setup` says which engine; `Engine` starts it and runs requests, alone or arriving while others decode. It also watches
what the scheduler and the graph dispatcher did, so that a result can say that the case under test really occurred.
"""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import count
from typing import Any

BLOCK = 32  # tokens of a cache block: what recall_model's page sizes give


@dataclass(frozen=True)
class Setup:
    """An engine: what a subprocess is told.

    runner: "v1" or "v2". patches: "all" (through the plugin entry point), "none", or names joined by commas.
    draft_tokens: 0 turns speculation off. prefix_unit: granularity of prefix matching, 0 for whole blocks.
    draft_block: tokens of the MTP layer's own cache block, 0 for that of the other layers.
    graphs: "full_and_piecewise", "full_decode_only" or "none". state: dtype of the recurrent state.
    blocks: size of the pool, so small that every block has been used before the experiments that need used ones.
    tail_step: every how many-th tail is tried.
    spoil: "state" or "conv" zeroes these tensors in every run after its first token, to prove that this is seen.
    """

    model: str
    runner: str = "v1"
    patches: str = "all"
    device: str = "cuda"
    draft_tokens: int = 3
    prefix_caching: bool = True
    prefix_unit: int = 0
    draft_block: int = 0
    graphs: str = "full_and_piecewise"
    state: str = "float16"
    blocks: int = 160
    spoil: str = ""
    experiments: tuple[str, ...] = ()
    tail_step: int = 1

    @property
    def name(self) -> str:
        return f"{self.runner} {({'none': 'stock', 'all': 'patched'}).get(self.patches, self.patches)}"

    def environment(self) -> dict[str, str]:
        """What must be set before vLLM is imported."""
        values = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_USE_V2_MODEL_RUNNER": "1" if self.runner == "v2" else "0",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        }
        if self.patches != "all":
            values["VLLM_PLUGINS"] = "qwen38_3090_early"
        if self.device == "cpu":
            values |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        return values

    def engine_arguments(self) -> dict[str, Any]:
        """Arguments of vLLM's EngineArgs."""
        sequences = 8
        arguments: dict[str, Any] = dict(
            model=self.model,
            skip_tokenizer_init=True,
            language_model_only=True,
            dtype="bfloat16",
            max_model_len=1024,
            max_num_seqs=sequences,
            max_num_batched_tokens=1024,
            block_size=BLOCK,
            num_gpu_blocks_override=self.blocks,
            mamba_ssm_cache_dtype=self.state,
            enable_prefix_caching=self.prefix_caching,
            enforce_eager=self.graphs == "none",
            seed=0,
        )
        if self.prefix_caching:
            arguments["mamba_cache_mode"] = "align"
            if self.prefix_unit:
                arguments["prefix_match_unit"] = self.prefix_unit
        if self.draft_tokens:
            arguments["speculative_config"] = {"method": "mtp", "num_speculative_tokens": self.draft_tokens}
        if self.device == "cuda":
            arguments |= dict(
                gpu_memory_utilization=0.1,
                kv_cache_memory_bytes=512 << 20,
                attention_config={"flash_attn_version": 2},
                kernel_config={"enable_flashinfer_autotune": False},
                gdn_prefill_backend="triton",
            )
        if self.graphs != "none":
            sizes = [(self.draft_tokens + 1) * rows for rows in (1, 2, 4, sequences)]
            arguments["compilation_config"] = {
                "cudagraph_mode": self.graphs.upper(),
                "cudagraph_capture_sizes": sizes,
                # Without pieces there is nothing to compile for, and starting is faster.
                **({"mode": 0} if self.graphs == "full_decode_only" else {}),
            }
        return arguments


@dataclass(frozen=True)
class Arrival:
    """A request: `length` greedy tokens after `prompt`, added once the first request of its run has `after` tokens."""

    prompt: list[int]
    length: int
    after: int = 0


@dataclass
class Reply:
    """tokens: the text. cached: prompt tokens taken from the prefix cache. gap: least distance in nats between the
    first and the second choice, where it was asked for."""

    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    gap: float | None = None


class Engine:
    """The engine of a `Setup`. Its environment must be set already."""

    def __init__(self, setup: Setup) -> None:
        if setup.patches not in ("all", "none"):
            for name in setup.patches.split(","):
                module = import_module(f"qwen38_3090.patches.{name}")
                module.PATCH.verify()
                module.apply()
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        if setup.draft_block:
            _give_draft_layer_its_own_block(setup.draft_block)
        self.setup = setup
        self.engine = LLMEngine.from_engine_args(EngineArgs(**setup.engine_arguments()))
        core = self.engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.vllm_config = core.vllm_config
        self.patches = self._patch_states()
        self.steps: Counter[str] = Counter()
        self._watch_scheduler()
        self._watch_graphs()
        self._ids = count()

    def run(self, arrivals: Sequence[Arrival]) -> list[Reply]:
        """Serve the requests until all are done; replies in the order of `arrivals`, without speculation with gaps."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        gaps = self.setup.draft_tokens == 0
        replies = [Reply() for _ in arrivals]
        waiting = list(range(len(arrivals)))
        running: dict[str, int] = {}
        spoiled = False
        while waiting or running:
            for index in [i for i in waiting if arrivals[i].after <= len(replies[0].tokens)]:
                waiting.remove(index)
                key = str(next(self._ids))
                running[key] = index
                parameters = SamplingParams(
                    temperature=0.0,
                    max_tokens=arrivals[index].length,
                    ignore_eos=True,
                    detokenize=False,
                    logprobs=2 if gaps else None,
                    output_kind=RequestOutputKind.CUMULATIVE,
                )
                self.engine.add_request(key, {"prompt_token_ids": arrivals[index].prompt}, parameters)
            for output in self.engine.step():
                reply = replies[running[output.request_id]]
                self.steps[f"gained {len(output.outputs[0].token_ids) - len(reply.tokens)}"] += 1
                reply.tokens = list(output.outputs[0].token_ids)
                reply.cached = output.num_cached_tokens or 0
                if gaps:
                    reply.gap = min(_gap(choices) for choices in output.outputs[0].logprobs)
                if output.finished:
                    del running[output.request_id]
            if self.setup.spoil and not spoiled and replies[0].tokens:
                spoiled = True
                self._spoil()
        return replies

    def alone(self, prompt: list[int], length: int) -> Reply:
        """Serve one request by itself."""
        return self.run([Arrival(prompt, length)])[0]

    def state_tensors(self) -> list[list[Any]]:
        """Convolution and recurrent state of each recurrent layer: tensors with a row for every cache block."""
        layers = self.vllm_config.compilation_config.static_forward_context
        return [list(layer.kv_cache) for name, layer in layers.items() if name.endswith("linear_attn")]

    def facts(self) -> dict[str, Any]:
        """What this engine turned out to be."""
        import torch
        import vllm

        config = self.vllm_config
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if self.setup.device == "cuda" else "cpu",
            "runner": type(self.runner).__module__,
            "graphs": str(config.compilation_config.cudagraph_mode),
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "groups": [
                [type(group.kv_cache_spec).__name__, group.kv_cache_spec.block_size, len(group.layer_names)]
                for group in self.scheduler.kv_cache_config.kv_cache_groups
            ],
            "blocks": self.scheduler.kv_cache_config.num_blocks,
            "hash_unit": self.scheduler.hash_block_size,
            "patches": self.patches,
        }

    def _patch_states(self) -> dict[str, str]:
        if self.setup.patches == "none":
            return {}
        if self.setup.patches != "all":
            return dict.fromkeys(self.setup.patches.split(","), "applied")
        from qwen38_3090.patches import report

        states = {state.patch.name: state.state for state in report()}
        if "applied" not in states.values():
            raise RuntimeError(f"vLLM's plugin entry point applied no patch: {states}")
        return states

    def _watch_scheduler(self) -> None:
        schedule = self.scheduler.schedule

        def watched(*args, **kwargs):
            output = schedule(*args, **kwargs)
            drafts = output.scheduled_spec_decode_tokens
            for request, tokens in output.num_scheduled_tokens.items():
                kind = "verify" if drafts.get(request) else "chunk"
                self.steps[f"{kind} {tokens}"] += 1
            return output

        self.scheduler.schedule = watched

    def _watch_graphs(self) -> None:
        """Count the steps that a FULL graph ran."""
        if self.setup.graphs == "none":
            return
        from vllm.config import CUDAGraphMode

        v2 = self.setup.runner == "v2"
        dispatcher = self.runner.cudagraph_manager if v2 else self.runner.cudagraph_dispatcher
        dispatch = dispatcher.dispatch

        def watched(*args, **kwargs):
            found = dispatch(*args, **kwargs)
            mode = found.cg_mode if v2 else found[0]
            self.steps["graph " + ("full" if mode == CUDAGraphMode.FULL else "other")] += 1
            return found

        dispatcher.dispatch = watched

    def _spoil(self) -> None:
        for conv, state in self.state_tensors():
            (conv if self.setup.spoil == "conv" else state).zero_()


def _gap(choices: dict[int, Any]) -> float:
    first, second = sorted((choice.logprob for choice in choices.values()), reverse=True)[:2]
    return first - second


def _give_draft_layer_its_own_block(tokens: int) -> None:
    """Give the MTP layer a smaller cache block in a page of the common size, as a drafter with wider pages has."""
    from vllm.model_executor.layers.attention import Attention

    original = Attention.get_kv_cache_spec

    def get_kv_cache_spec(self, vllm_config):
        spec = original(self, vllm_config)
        if spec is None or not self.layer_name.startswith("mtp."):
            return spec
        return replace(spec, block_size=tokens, page_size_padded=spec.page_size_bytes)

    Attention.get_kv_cache_spec = get_kv_cache_spec
