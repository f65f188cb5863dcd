"""Prefix caching of recurrent states counts in the mamba group's own block.

With `--mamba-cache-mode align`, column p of a request's state blocks is cached as the state after (p + 1) * M tokens,
M being the mamba group's block size. Three places of vLLM 0.27.1 count in `cache_config.block_size` instead. The engine
core sets that to the smallest block of all groups (a drafter's sliding window may have a smaller one), and the
re-run of `VllmConfig.__post_init__` in a server on the CPU resets it to 128. Then:

- `Scheduler._mamba_block_aligned_split` ends prefill chunks at multiples of the wrong unit. A state taken at 2,048
  tokens gets cached as the state after 2,176, and every later hit on it continues from the wrong text. On the CPU
  (M = 256, unit 128, steps of 2,048) that takes a step that two prompts share; a prompt alone only misses hits.
- `MambaHybridModelState.add_request` (V2 runner) takes the hit state of a resumed request from the wrong column.
- `resolve_kv_cache_block_sizes` takes the least common multiple of all blocks as the hash unit when M is not
  `cache_config.block_size`. A group with a smaller block cannot use that, and an assertion stops the server at start.
  Here M is compared with itself, and the unit is the common divisor (or `--prefix-match-unit`). Only where the lookup
  can serve it, though: groups that match whole blocks only (a sliding window) must have the unit for their block.
  Elsewhere the assertion stays; without it the first request would fail on another one.

A fourth fault is a limit, not a unit: the split waits for room for a whole block unless a block is larger than a step.
What running decodes take of each step was not counted, so a prompt could wait as long as they ran. When the split
finds no room, it is asked again with the room that they leave; it then advances within a block, as it does for
blocks larger than a step, and stops at the block's end.
"""

from contextlib import contextmanager
from functools import wraps

from qwen38_3090.patches.patch import AppliesTo, Patch, Rebinding, Target

PATCH = Patch(
    name="align_block_size",
    why="Without it a prefix-cache hit can continue from the state of another position, and the answer derails.",
    targets=(
        Target("vllm.v1.core.sched.scheduler:Scheduler._mamba_block_aligned_split", "e7d243ea142ae0f9"),
        Target("vllm.v1.core.sched.scheduler:Scheduler.schedule", "c4b261b417b7fa7e"),
        Target("vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState.add_request", "f91ceb2a824e0c10"),
        Target("vllm.v1.core.kv_cache_utils:resolve_kv_cache_block_sizes", "ede561bb39ffa454"),
        Target("vllm.v1.core.kv_cache_coordinator:HybridKVCacheCoordinator", "630ee14864892205"),
        Target("vllm.v1.core.single_type_kv_cache_manager:MambaManager", "9f0fdbaedb783c3d"),
        Target(
            "vllm.v1.core.single_type_kv_cache_manager:SlidingWindowManager.find_longest_cache_hit", "06ed9490bf7b0675"
        ),
        Target("vllm.v1.engine.core:EngineCore._initialize_kv_caches", "e39aa04c4eafce4d"),
        Target("vllm.model_executor.layers.mamba.abstract:MambaBase.get_kv_cache_spec", "e32a3b27f24cca6e"),
    ),
    upstream="#53142, #54076, #55601 (open, 2026-09); the hash unit and the wait for room: none",
    retires_when="vLLM takes all of them from the mamba group's spec",
    switch="PATCH_ALIGN_BLOCK_SIZE",
    applies_to=AppliesTo(modes="prefix caching on a hybrid model"),
)

_rebinding = Rebinding()


def apply() -> None:
    """Wrap the split, the resume column and the choice of the hash unit."""
    _rebinding.wrap("vllm.v1.core.sched.scheduler:Scheduler._mamba_block_aligned_split", _split_by_mamba_block)
    _rebinding.wrap(
        "vllm.v1.worker.gpu.model_states.mamba_hybrid:MambaHybridModelState.add_request", _resume_in_mamba_blocks
    )
    _rebinding.wrap(
        "vllm.v1.core.kv_cache_utils:resolve_kv_cache_block_sizes",
        _hash_for_every_group,
        holders=("vllm.v1.engine.core",),
    )


def revert() -> None:
    """Put vLLM's own functions back."""
    _rebinding.undo()


def _split_by_mamba_block(original):
    @wraps(original)
    def split(self, request, num_new_tokens, *args, **kwargs):
        block = _mamba_block(self.kv_cache_config)
        with _set(self.cache_config, block_size=block):
            chunk = original(self, request, num_new_tokens, *args, **kwargs)
            if chunk or not num_new_tokens:
                return chunk
            room = self.max_num_scheduled_tokens - _decode_tokens(self, request)
            if block <= room:
                return chunk
            with _set(self, max_num_scheduled_tokens=room):
                return original(self, request, num_new_tokens, *args, **kwargs)

    return split


def _resume_in_mamba_blocks(original):
    @wraps(original)
    def add_request(self, req_index, new_req_data):
        original(self, req_index, new_req_data)
        if self._align_mode:
            # The specs of the mamba groups get their block from here, and nothing changes either afterwards.
            block = self.cache_config.mamba_block_size
            self._mamba_state_idx_gpu[req_index].fill_((new_req_data.num_computed_tokens - 1) // block)

    return add_request


def _hash_for_every_group(original):
    @wraps(original)
    def resolve(kv_cache_config, vllm_config):
        sizes = original(kv_cache_config, vllm_config)
        cache_config = vllm_config.cache_config
        if not kv_cache_config.has_mamba_layers or cache_config.mamba_cache_mode != "align":
            return sizes
        with _set(cache_config, block_size=_mamba_block(kv_cache_config)):
            finer = original(kv_cache_config, vllm_config)
        whole = _blocks_matched_whole(kv_cache_config)
        return finer if whole <= {finer[1]} else sizes

    return resolve


def _mamba_block(kv_cache_config) -> int:
    from vllm.v1.kv_cache_interface import MambaSpec

    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return next(spec.block_size for spec in specs if isinstance(spec, MambaSpec))


def _blocks_matched_whole(kv_cache_config) -> set[int]:
    """Block sizes of the groups whose cache lookup knows no part of a block."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return {spec.block_size for spec in specs if not isinstance(spec, (FullAttentionSpec, MambaSpec))}


def _decode_tokens(scheduler, request) -> int:
    """Tokens of a step that the running decodes other than `request` take."""
    decodes = sum(not other.is_prefill_chunk and other is not request for other in scheduler.running)
    return decodes * (1 + scheduler.num_spec_tokens)


@contextmanager
def _set(owner, **values):
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
