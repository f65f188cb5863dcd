"""vLLM's own Scheduler over a small hybrid model, and a worker that keeps symbols in the place of tensors.

The scheduler, its block pool and its prefix cache are the real ones, built the way the engine core builds them. The
worker follows the block tables that it is sent and moves recurrent state by the rules of vLLM's "align" kernels, but
what it stores is the text (as a chained hash) that a state or a key stands for, so a wrong state is an unequal symbol.
"""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

PAD = -1
WRONG = 1

TEXT = {
    "model_type": "qwen3_5_text",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "max_position_embeddings": 65536,
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}


@lru_cache
def _checkpoint() -> tempfile.TemporaryDirectory:
    """A model directory that holds a config.json and lives as long as the process."""
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": "bfloat16",
        "text_config": TEXT,
        "vision_config": VISION,
    }
    directory = tempfile.TemporaryDirectory()
    Path(directory.name, "config.json").write_text(json.dumps(config))
    return directory


@lru_cache
def _model_config(max_model_len: int):
    from vllm.config import ModelConfig

    return ModelConfig(
        model=_checkpoint().name, skip_tokenizer_init=True, max_model_len=max_model_len, language_model_only=True
    )


def vllm_config(*, drafts=3, budget=2048, sequences=8, max_model_len=4096, caching=True, threshold=0, lengths=None):
    """A VllmConfig for a hybrid of one full-attention and three GDN layers with `drafts` MTP drafts (0: none)."""
    from vllm.config import CacheConfig, ParallelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig

    model, parallel = _model_config(max_model_len), ParallelConfig()
    speculation = None
    if drafts:
        speculation = SpeculativeConfig(
            method="mtp",
            num_speculative_tokens=drafts,
            num_speculative_tokens_per_batch_size=lengths,
            target_model_config=model,
            target_parallel_config=parallel,
        )
    return VllmConfig(
        model_config=model,
        parallel_config=parallel,
        cache_config=CacheConfig(enable_prefix_caching=caching, mamba_cache_mode="align" if caching else "none"),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=sequences,
            max_model_len=max_model_len,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            long_prefill_token_threshold=threshold,
        ),
        speculative_config=speculation,
    )


def kv_cache_config(*, drafts=3, block=64, window_block=0, caching=True, blocks=4000):
    """Groups of one full-attention layer, three GDN layers and, with `window_block`, a drafter's sliding window."""
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    heads = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.bfloat16}
    mamba = MambaSpec(
        # Without prefix caching one block holds the state at every length.
        block_size=block if caching else 65536,
        shapes=((3 + drafts, 128), (2, 32, 32)),
        dtypes=(torch.bfloat16, torch.float32),
        mamba_cache_mode="align" if caching else "none",
        num_speculative_blocks=drafts,
    )
    groups = [
        KVCacheGroupSpec(
            ["full"], FullAttentionSpec(block_size=block, **heads), is_eagle_group=bool(drafts) and not window_block
        ),
        KVCacheGroupSpec(["gdn.0"], mamba),
        KVCacheGroupSpec(["gdn.1"], mamba),
    ]
    if window_block:
        window = SlidingWindowSpec(block_size=window_block, sliding_window=16 * window_block, **heads)
        groups.append(KVCacheGroupSpec(["drafter"], window, is_eagle_group=bool(drafts)))
    return KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def scheduler(config, groups, *, asynchronous=False, log_stats=False):
    """The Scheduler (or AsyncScheduler) as `EngineCore.__init__` builds it, `cache_config.block_size` included."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import core
    from vllm.v1.structured_output import StructuredOutputManager

    config.scheduler_config.async_scheduling = asynchronous
    config.cache_config.num_gpu_blocks = groups.num_blocks
    config.cache_config.block_size = min(group.kv_cache_spec.block_size for group in groups.kv_cache_groups)
    block, hash_block = core.resolve_kv_cache_block_sizes(groups, config)
    return (AsyncScheduler if asynchronous else Scheduler)(
        vllm_config=config,
        kv_cache_config=groups,
        structured_output_manager=StructuredOutputManager(config),
        block_size=block,
        hash_block_size=hash_block,
        log_stats=log_stats,
    )


def request(name: str, prompt: Sequence[int], max_tokens: int, hash_block: int):
    """A greedy request that ignores end-of-sequence tokens."""
    from vllm import SamplingParams
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    _seed_hashes()
    return Request(
        request_id=name,
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        pooling_params=None,
        block_hasher=get_request_block_hasher(hash_block, _digest),
    )


@lru_cache
def _seed_hashes() -> None:
    from vllm.v1.core.kv_cache_utils import init_none_hash

    init_none_hash(_digest)


def _digest(value) -> bytes:
    return hash(value).to_bytes(8, "little", signed=True)


class Row:
    """What the worker keeps of one request: its block tables, how far it is, and where its state lies."""

    def __init__(self, data, text: list[int], state_block: int) -> None:
        self.marks = [0]
        for token in text:
            self.marks.append(hash((self.marks[-1], token)))
        self.text = text
        self.known = len(data.prompt_token_ids)
        self.blocks = [list(ids) for ids in data.block_ids]
        self.computed = data.num_computed_tokens
        # The column that holds the state; without prefix caching there is one only.
        self.column = (self.computed - 1) // state_block if state_block else 0
        self.accepted = 1
        self.fresh = True


@dataclass(frozen=True)
class Fault:
    """Something that the worker read and that was not there."""

    request: str
    position: int
    what: str


class Worker:
    """Runs scheduler outputs and notes in `faults` what a row read wrong.

    texts: the whole text of each request, prompt first: the target "samples" its next token.
    accept: how many drafts of a full block the target accepts, asked once for each row with drafts.
    placeholders: -1 stands for a draft of the worker's own (asynchronous scheduling); else it is never accepted.
    forgetful: a row that a step leaves out restarts with one accepted token, as in the V1 runner.
    seed_block: unit of the first state column of a row that starts at a cached prefix (default: the mamba block).
    """

    def __init__(
        self,
        groups,
        texts: dict[str, list[int]],
        accept: Callable[[], int] = lambda: 0,
        *,
        placeholders: bool = False,
        forgetful: bool = False,
        seed_block: int = 0,
    ) -> None:
        from vllm.v1.kv_cache_interface import MambaSpec

        self.specs = [group.kv_cache_spec for group in groups.kv_cache_groups]
        self.mamba = [i for i, spec in enumerate(self.specs) if isinstance(spec, MambaSpec)]
        state = self.specs[self.mamba[0]]
        self.unit = state.block_size
        self.align = state.mamba_cache_mode == "align"
        self.drafts = state.num_speculative_blocks
        self.texts, self.accept = texts, accept
        self.placeholders, self.forgetful, self.seed_block = placeholders, forgetful, seed_block or self.unit
        if not self.align:
            self.seed_block = 0
        self.rows: dict[str, Row] = {}
        self.states: dict[int, int] = {}
        self.keys: dict[tuple[int, int], int] = {}
        self.faults: list[Fault] = []

    def execute(self, output):
        """Run one step; returns its ModelRunnerOutput."""
        from vllm.v1.outputs import ModelRunnerOutput

        for name in output.finished_req_ids:
            self.rows.pop(name, None)
        for data in output.scheduled_new_reqs:
            self.rows[data.req_id] = Row(data, self.texts[data.req_id], self.seed_block)
        cached = output.scheduled_cached_reqs
        assert not cached.resumed_req_ids, "this worker knows no preemption"
        for name, ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            for blocks, new in zip(self.rows[name].blocks, ids or [()] * len(self.specs), strict=True):
                blocks.extend(new)
        for copy in output.kv_cache_block_copies or ():
            self._copy_block(copy.src_block_id, copy.dst_block_id)
        names = list(output.num_scheduled_tokens)
        if self.forgetful:
            for name in self.rows.keys() - names:
                self.rows[name].accepted = 1
        sampled = [
            self._step(name, output.num_scheduled_tokens[name], output.scheduled_spec_decode_tokens.get(name, []))
            for name in names
        ]
        return ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=sampled
        )

    def _step(self, name: str, length: int, drafts: list[int]) -> list[int]:
        row = self.rows[name]
        base = row.computed + length - len(drafts)
        assert base + len(drafts) < len(row.text), "the text is too short"
        real = len(drafts) if self.placeholders else sum(token != PAD for token in drafts)
        sampling = base >= row.known
        accepted = min(self.accept(), real) if drafts and sampling else 0
        self._check_keys(name, row)
        if self.align:
            self._enter_block(name, row, row.computed + length)
        for group in self.mamba:
            blocks = row.blocks[group]
            # The path for rows with drafts starts after the last accepted token, the other one in the first column.
            source = blocks[row.column + (row.accepted - 1 if drafts else 0)]
            if row.computed and self.states.get(source) != row.marks[row.computed]:
                self.faults.append(Fault(name, row.computed, "state"))
            for i in range(len(drafts) + 1):
                self.states[blocks[row.column + i]] = row.marks[base + i] if i <= accepted else WRONG
        for group, spec in enumerate(self.specs):
            if group not in self.mamba:
                for at in range(row.computed, row.computed + length):
                    block = row.blocks[group][at // spec.block_size]
                    self.keys[block, at % spec.block_size] = row.marks[at + 1] if at < base + accepted else WRONG
        row.computed = base + accepted
        row.accepted = 1 + accepted
        row.fresh = False
        if self.align and self.drafts:
            self._save_block_end(row, base)
        if not sampling:
            return []
        row.known = row.computed + 1
        return row.text[base : row.known]

    def _enter_block(self, name: str, row: Row, end: int) -> None:
        column = -(-end // self.unit) - 1
        if row.column >= 0 and row.column != column:
            for group in self.mamba:
                blocks = row.blocks[group]
                source = row.column + row.accepted - 1
                if source >= len(blocks):
                    self.faults.append(Fault(name, row.computed, "column"))
                    continue
                self.states[blocks[column]] = self.states.get(blocks[source], WRONG)
            row.accepted = 1
        row.column = column

    def _save_block_end(self, row: Row, base: int) -> None:
        end = row.computed // self.unit * self.unit
        if end < base:
            return
        target = end // self.unit - 1
        for group in self.mamba:
            blocks = row.blocks[group]
            self.states[blocks[target]] = self.states[blocks[row.column + end - base]]
        if target == row.column:
            row.accepted = 1

    def _check_keys(self, name: str, row: Row) -> None:
        for group, spec in enumerate(self.specs):
            if group in self.mamba:
                continue
            first = row.computed - (getattr(spec, "sliding_window", None) or row.computed + 1) + 1
            if not row.fresh:
                first = max(first, row.computed - 2 * spec.block_size)
            for at in range(max(first, 0), row.computed):
                block = row.blocks[group][at // spec.block_size]
                if self.keys.get((block, at % spec.block_size)) != row.marks[at + 1]:
                    self.faults.append(Fault(name, at, spec.__class__.__name__))
                    break

    def _copy_block(self, source: int, target: int) -> None:
        if source in self.states:
            self.states[target] = self.states[source]
        for (block, offset), mark in list(self.keys.items()):
            if block == source:
                self.keys[target, offset] = mark


def run(engine, worker: Worker, requests: Sequence, *, draft=None, limit: int = 2000) -> list:
    """Add the requests, step until all have finished and return the scheduler outputs of all steps.

    One step at a time, or two in flight with an AsyncScheduler, in the order of the engine core.
    draft: returns the drafts for one request (default: a full block).
    """
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    depth = 2 if isinstance(engine, AsyncScheduler) else 1
    for item in requests:
        engine.add_request(item)
    draft = draft or (lambda: [1] * worker.drafts)
    outputs, flying = [], []
    while engine.has_requests():
        outputs.append(engine.schedule())
        assert len(outputs) < limit, "the scheduler makes no progress"
        flying.append((outputs[-1], worker.execute(outputs[-1])))
        if len(flying) == depth or not outputs[-1].num_scheduled_tokens:
            update(engine, *flying.pop(0), draft)
    for step in flying:
        update(engine, *step, draft)
    return outputs


def update(engine, output, result, draft) -> None:
    """Hand a step's result to the scheduler and, without asynchronous scheduling, new drafts for its requests."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.outputs import DraftTokenIds

    engine.update_from_output(output, result)
    if engine.num_spec_tokens and result.req_ids and not isinstance(engine, AsyncScheduler):
        engine.update_draft_token_ids(DraftTokenIds(result.req_ids, [draft() for _ in result.req_ids]))
