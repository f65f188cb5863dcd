"""Verified rows of a mixed batch get their own gates, not those of whoever stands first in the batch.

In a step that holds verified (spec) rows beside others, the GDN layer gathers q, k and v of the spec rows into a dense
tensor but hands the kernel the gates a and b of the whole batch; the kernel indexes both by the dense position. Right
only when all spec rows stand in front, which neither runner promises. The CPU path gathers.
"""

import functools

from qwen38_3090.patches.patch import AppliesTo, Patch, Rebinding, Target

PATCH = Patch(
    name="gdn_gate_gather",
    why="When a request decodes with drafts while a short prompt or a request without drafts runs beside it, its state "
    "is updated with the other request's gates, and its answer goes wrong.",
    targets=(
        Target(
            "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:QwenGatedDeltaNetAttention._forward_core",
            "2360de372a4c0189",
        ),
        Target(
            "vllm.third_party.flash_linear_attention.ops.fused_sigmoid_gating:fused_sigmoid_gating_delta_rule_update",
            "913a1b2e52e1082b",
        ),
        Target("vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder.build", "0bd8602dfc6ae79c"),
    ),
    upstream="#51812 (merged, in 0.28.0)",
    retires_when="vLLM >= 0.28.0",
    switch="PATCH_GDN_GATE_GATHER",
    applies_to=AppliesTo(platforms=("cuda",), modes="all with speculation"),
)

_rebinding = Rebinding()


def apply() -> None:
    """Gather the gates of the spec rows where q, k and v are gathered."""
    _rebinding.wrap(
        "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn:fused_sigmoid_gating_delta_rule_update",
        _make_update,
    )


def revert() -> None:
    """Put vLLM's own call back."""
    _rebinding.undo()


def _make_update(original):
    @functools.wraps(original)
    def fused_sigmoid_gating_delta_rule_update(A_log, a, b, dt_bias, q, *args, **kwargs):
        # Lengths differ only for the spec rows of a mixed batch, which never runs inside a captured graph.
        if kwargs.get("num_accepted_tokens") is not None and a.shape[0] != q.shape[1]:
            index = _spec_token_index()
            a, b = a.index_select(0, index), b.index_select(0, index)
        return original(A_log, a, b, dt_bias, q, *args, **kwargs)

    return fused_sigmoid_gating_delta_rule_update


def _spec_token_index():
    """Positions of the spec rows' tokens in the batch of the step that runs (int64 [tokens]); all GDN layers agree."""
    from vllm.forward_context import get_forward_context
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

    by_layer = get_forward_context().attn_metadata
    return next(m.spec_token_indx for m in by_layer.values() if isinstance(m, GDNAttentionMetadata))
