"""The GDN kernels index states by the number of accepted tokens; the metadata builder keeps it in range.

The kernels read column accepted-1 of a row of drafts+1 state indices, and the convolution window that starts at token
accepted-1; none of them checks. A stale count (0 after a step that emitted nothing for the row, or the count of
whichever request had the row before) reads another request's state. The bounds are 1 and drafts+1. The query length
is none: after a long verify step that accepted many tokens, a shorter one starts from the same column.
"""

import functools

from qwen38_3090.patches.patch import AppliesTo, Patch, Rebinding, Target

PATCH = Patch(
    name="gdn_accept_bounds",
    why="A stale count of accepted tokens continues a request from another request's state, or crashes the server with "
    "an illegal memory access.",
    targets=(
        Target("vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder.build", "0bd8602dfc6ae79c"),
        Target("vllm.model_executor.layers.mamba.ops.causal_conv1d:_causal_conv1d_update_kernel", "b13147f52c0aa547"),
        Target(
            "vllm.third_party.flash_linear_attention.ops.fused_sigmoid_gating:"
            "fused_sigmoid_gating_delta_rule_update_kernel",
            "65a07702016a6040",
        ),
    ),
    upstream="#50021 (open, 2026-09; its test in the convolution refuses valid counts, so it is not what this does)",
    retires_when="the GDN kernels check the count against the width of the state index row",
    switch="PATCH_GDN_ACCEPT_BOUNDS",
    applies_to=AppliesTo(modes="all with speculation"),
)

_rebinding = Rebinding()


def apply() -> None:
    """Clamp the accepted counts that the GDN metadata builder hands to the kernels."""
    _rebinding.wrap("vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder.build", _make_build)


def revert() -> None:
    """Put vLLM's own builder back."""
    _rebinding.undo()


def _make_build(original):
    @functools.wraps(original)
    def build(self, *args, **kwargs):
        metadata = original(self, *args, **kwargs)
        if metadata.num_accepted_tokens is not None:
            # The builder's own tensor on both runners (a masked copy, or the buffer that FULL graphs read), never the
            # runner's: one small launch for all layers of the group, no allocation, no sync, before any replay.
            metadata.num_accepted_tokens.clamp_(1, self.num_spec + 1)
        return metadata

    return build
