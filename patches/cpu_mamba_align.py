"""Bodies for the CPU of the two Triton kernels that move recurrent state between blocks (`--mamba-cache-mode align`).

vLLM's CPU runner has stand-ins for the Triton kernels it launches, but not for these two. Ours take a kernel's own
arguments, raw addresses included, and are installed the same way.
"""

import ctypes

import torch
from qwen38_3090.patches.patch import AppliesTo, Patch, Rebinding, Target

PATCH = Patch(
    name="cpu_mamba_align",
    why="Without it a server on the CPU with MTP and prefix caching dies at the first request.",
    targets=(
        Target("vllm.v1.worker.mamba_utils:precopy_mamba_align_fused_kernel", "06ffa2b73c07357f"),
        Target("vllm.v1.worker.mamba_utils:postprocess_mamba_fused_kernel", "b0054086581da03d"),
        Target("vllm.v1.worker.mamba_utils:_copy_mamba_state_block", "854e4ae75d7724ec"),
        Target("vllm.v1.worker.mamba_utils:MambaSpecDecodeGPUContext", "344c00bf6ec71b67"),
        Target("vllm.utils.cpu_triton_utils:_FuncWrapper", "435440d2196424e0"),
    ),
    upstream="none found: 0.27.1's CPU runner replaces batch_memcpy_kernel alone (2026-09)",
    retires_when="CPUModelRunner._postprocess_triton installs stand-ins for both kernels",
    switch="PATCH_CPU_MAMBA_ALIGN",
    applies_to=AppliesTo(platforms=("cpu",), runners=("v1",), modes="speculation with prefix caching"),
)

_rebinding = Rebinding()


def apply() -> None:
    """Put the stand-ins in the kernels' place."""
    for kernel, body in (
        ("precopy_mamba_align_fused_kernel", _precopy),
        ("postprocess_mamba_fused_kernel", _postprocess),
    ):
        _rebinding.wrap(f"vllm.v1.worker.mamba_utils:{kernel}", lambda _, body=body: _launchable(body))


def revert() -> None:
    """Put the kernels back."""
    _rebinding.undo()


def _launchable(body):
    from vllm.utils.cpu_triton_utils import _FuncWrapper

    return _FuncWrapper(body)


def _precopy(mamba_state_idx, src_col, token_bias, *arguments, CONV_STATE_DIM_FIRST, **_) -> None:
    """Before a step: bring a request's state into the block that the step writes, if that is another block.

    mamba_state_idx, src_col, token_bias: int32 [num_reqs], the block-table columns to write and read (-1: no state
    yet) and how many tokens after the first one the last step accepted.
    """
    *layout, idx_mapping, num_reqs = arguments
    _require_batch_order(idx_mapping)
    for row in range(num_reqs):
        source, target = int(src_col[row]), int(mamba_state_idx[row])
        if source >= 0 and source != target:
            _copy_states(layout, CONV_STATE_DIM_FIRST, row, source, target, int(token_bias[row]))


def _postprocess(
    num_accepted_tokens,
    mamba_state_idx,
    num_scheduled_tokens,
    num_computed_tokens,
    num_draft_tokens,
    *arguments,
    block_size,
    CONV_STATE_DIM_FIRST,
    **_,
) -> None:
    """After a step: when the accepted tokens reach or pass the end of a block, keep the state at that end in it.

    All int32 [num_reqs]. The step left one state after each token from the last one that is no draft on.
    """
    *layout, num_accepted_tokens_out, idx_mapping, num_reqs = arguments
    _require_batch_order(idx_mapping)
    for row in range(num_reqs):
        first = int(num_computed_tokens[row]) + int(num_scheduled_tokens[row]) - int(num_draft_tokens[row])
        accepted_end = first + int(num_accepted_tokens[row]) - 1
        block_end = accepted_end // block_size * block_size
        if block_end < first:
            continue
        source, target = int(mamba_state_idx[row]), block_end // block_size - 1
        if source == target:
            num_accepted_tokens_out[row] = 1
        if source != target or block_end != first:
            _copy_states(layout, CONV_STATE_DIM_FIRST, row, source, target, block_end - first)


def _require_batch_order(idx_mapping: torch.Tensor | None) -> None:
    if idx_mapping is not None:
        raise NotImplementedError("only the V1 model runner, whose arrays are in batch order, runs on the CPU")


def _copy_states(layout: list, dim_first: bool, row: int, source: int, target: int, bias: int) -> None:
    """Copy request `row`'s states of all layers from block-table column `source` to `target`, `bias` tokens on.

    A convolution state is a window over tokens in one block, so the copy starts `bias` tokens later in it. Of
    temporal states there is one a column, so the one `bias` columns later is copied.
    layout: MambaSpecDecodeGPUContext's block_table_ptrs, block_table_stride_req, state_base_addrs,
    state_block_strides, state_elem_sizes, state_inner_sizes, state_conv_widths, state_group_indices,
    state_dim_row_count, state_dim_row_stride: one entry a group or one a layer and state; block and row strides in
    bytes, the table's in entries.
    """
    tables, entries, *columns = layout
    rows = [(ctypes.c_int32 * entries).from_address(table + 4 * row * entries) for table in tables.tolist()]
    for base, block_bytes, element_bytes, inner, width, group, channels, channel_bytes in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        blocks = rows[group]
        target_start = base + blocks[target] * block_bytes
        token_bytes = inner * element_bytes
        if width:
            source_start = base + blocks[source] * block_bytes + bias * token_bytes
            size = (width - bias) * token_bytes
        else:
            source_start = base + blocks[source + bias] * block_bytes
            size = token_bytes
        # With the channels first there is a window for each channel, else one window of tokens that hold the channels.
        for window in range(channels if width and dim_first else 1):
            offset = window * channel_bytes
            ctypes.memmove(target_start + offset, source_start + offset, size)
