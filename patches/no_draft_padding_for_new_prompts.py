"""A prompt of one token starts from no state, not from what another request left in its block.

Blocks of recurrent state are not cleared when they change hands; a row is told to ignore what lies there by
`has_initial_state`, which the GDN backend has for prefill rows only. A prompt of one token that is not computed yet
is not one of them in two cases:

- While only decodes run, `Scheduler.schedule` pads every waiting request that has one token to compute to a block of
  1 + drafts tokens, so that the step can replay a CUDA graph. The row then counts as a verified decode. That is right
  after a prefix hit or a preemption, when there is a state to start from. Here requests without one are not padded,
  and the GDN backend, which has verified rows beside them, takes them for prefills.
- In a batch without verified rows and with no longer chunk before it, a row of one token counts as a decode. The
  step may replay a captured graph, so the row stays one; its block is cleared instead.
"""

from functools import wraps

from qwen38_3090.patches.patch import AppliesTo, Patch, Rebinding, Target

PATCH = Patch(
    name="no_draft_padding_for_new_prompts",
    why="Without it the answer to a prompt of one token depends on what other requests said before.",
    targets=(
        Target("vllm.v1.core.sched.scheduler:Scheduler.schedule", "c4b261b417b7fa7e"),
        Target("vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder.__init__", "49c1ffe68c662558"),
        Target("vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder.build", "0bd8602dfc6ae79c"),
        Target("vllm.v1.attention.backends.utils:split_decodes_and_prefills", "5ebd74455e1e3b28"),
        Target("vllm.v1.attention.backends.utils:mamba_get_block_table_tensor", "08bc850a682104c8"),
        Target("vllm.v1.attention.backend:CommonAttentionMetadata", "5e76d4d2d7a6c087"),
    ),
    upstream="none found (2026-09)",
    retires_when="the GDN backend knows for every row whether it has a state to start from",
    switch="PATCH_NO_DRAFT_PADDING_FOR_NEW_PROMPTS",
    applies_to=AppliesTo(modes="all with a hybrid model"),
)

_rebinding = Rebinding()


def apply() -> None:
    """Wrap the scheduler's step and the GDN metadata builder."""
    builder = "vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder"
    _rebinding.wrap("vllm.v1.core.sched.scheduler:Scheduler.schedule", _without_padding)
    _rebinding.wrap(f"{builder}.__init__", _with_layer_names)
    _rebinding.wrap(f"{builder}.build", _with_cleared_blocks)


def revert() -> None:
    """Put vLLM's own functions back."""
    _rebinding.undo()


class _Constant:
    """In the place of a table of draft counts by batch size: with a table, the scheduler pads nothing."""

    def __init__(self, drafts: int) -> None:
        self.drafts = drafts

    def __getitem__(self, batch_size: int) -> int:
        return self.drafts


def _without_padding(original):
    @wraps(original)
    def schedule(self, *args, **kwargs):
        pads = self.num_spec_tokens > 0 and self.dynamic_sd_lookup is None and self.has_mamba_layers
        # One token known, so none computed: there is nothing before it, and no hit on the whole of a prompt.
        if not pads or not any(r.num_tokens == 1 for queue in (self.waiting, self.skipped_waiting) for r in queue):
            return original(self, *args, **kwargs)
        self.dynamic_sd_lookup = _Constant(self.num_spec_tokens)
        try:
            return original(self, *args, **kwargs)
        finally:
            self.dynamic_sd_lookup = None

    return schedule


def _with_layer_names(original):
    @wraps(original)
    def init(self, kv_cache_spec, layer_names, *args, **kwargs):
        original(self, kv_cache_spec, layer_names, *args, **kwargs)
        self.layer_names = layer_names

    return init


def _with_cleared_blocks(original):
    @wraps(original)
    def build(self, common_prefix_len, common_attn_metadata, *args, **kwargs):
        metadata = original(self, common_prefix_len, common_attn_metadata, *args, **kwargs)
        rows = _new_one_token_rows(common_attn_metadata)
        if rows:
            # Such a request has computed nothing, so its state goes into the first column.
            blocks = common_attn_metadata.block_table_tensor[rows, 0]
            layers = self.compilation_config.static_forward_context
            for name in self.layer_names:
                for state in layers[name].kv_cache:
                    state[blocks] = 0
        return metadata

    return build


def _new_one_token_rows(common) -> list[int]:
    """Rows of requests whose one and only token is computed in this step, read on the host without synchronising."""
    if common.is_prefilling is None or common.seq_lens_cpu_upper_bound is None:
        return []
    one_token = common.query_start_loc_cpu.diff() == 1
    # The bound is exact for rows that prefill; padding rows and dummy runs do not.
    new = one_token & common.is_prefilling & (common.seq_lens_cpu_upper_bound[: len(one_token)] == 1)
    return new.nonzero().flatten().tolist()
