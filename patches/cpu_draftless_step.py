"""On the CPU, a request goes on from its own recurrent state when a step brings it fewer drafts than configured.

A verify step leaves one recurrent state after each of its tokens, in columns 0, 1, ... of a request's state blocks,
and a window of inputs for the convolution. When it accepts a tokens, the request goes on from column a - 1, and a - 1
tokens further on in the window. vLLM 0.27.1's CPU path does so only if the next step verifies all drafts again:

- With fewer drafts, the window's new inputs land behind rejected ones, where the step after does not look for them;
  with fewer tokens than were accepted, the convolution raises an error.
- Without drafts, the row is taken for an ordinary decode, which goes on from column 0. Where one is alone, the
  recurrence raises an error over the stride of its index.
- A request that a step leaves out comes back with a = 1.

Grammars, n-gram drafting, a full token budget and the end of the context bring such steps about.
"""

from dataclasses import replace
from functools import wraps

import torch
from qwen38_3090.patches.patch import AppliesTo, Patch, Rebinding, Target

_GDN = "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention"

PATCH = Patch(
    name="cpu_draftless_step",
    why="Without it a server on the CPU with MTP loses its thread, or dies, at JSON schemas and tool calls.",
    targets=(
        Target("vllm._custom_ops:fused_sigmoid_gating_delta_rule_update_cpu", "d5c17f9270660d07"),
        Target(f"{_GDN}:_spec_forward", "955d67467eb5bb90"),
        Target(f"{_GDN}:_cpu_gdn_attention_spec_aware", "2382c945c4b8d4b9"),
        Target(f"{_GDN}:_spec_aware_nonspec", "167696bfb61b0206"),
        Target("vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadata", "fa3b3046e2f6f188"),
        Target("vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder.build", "0bd8602dfc6ae79c"),
        Target("vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states", "8694743d61681dde"),
        Target("vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs", "9dbd5de665d43d53"),
        Target("vllm.v1.worker.gpu_model_runner:GPUModelRunner._build_attention_metadata", "b4637a38f678d538"),
        Target("vllm.v1.worker.gpu_input_batch:InputBatch.add_request", "cdd4acdc6f75d38c"),
        Target("vllm.v1.worker.cpu_model_runner:CPUModelRunner", "80bf5eb62d571a0f"),
    ),
    upstream="#40875 (issue, open), #56531 (open, 2026-09), both on the GPU; none found for the CPU",
    retires_when="the CPU's GDN path keeps the state for verify steps of any length",
    switch="PATCH_CPU_DRAFTLESS_STEP",
    applies_to=AppliesTo(platforms=("cpu",), runners=("v1",), modes="speculation"),
)

_rebinding = Rebinding()


def apply() -> None:
    """Wrap the GDN operators of the CPU and the two methods of its runner that say what they go on from."""
    runner = "vllm.v1.worker.cpu_model_runner:CPUModelRunner"
    _rebinding.wrap("vllm._custom_ops:fused_sigmoid_gating_delta_rule_update_cpu", _with_dense_index)
    _rebinding.wrap(f"{_GDN}:_spec_forward", _by_length)
    _rebinding.wrap(f"{runner}._build_attention_metadata", _with_draftless_rows)
    _rebinding.wrap(f"{runner}._update_states", _with_skipped_requests)


def revert() -> None:
    """Put vLLM's own functions back."""
    _rebinding.undo()


def _with_dense_index(original):
    @wraps(original)
    def update(A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, *args, **kwargs):
        # One entry of a table's column counts as contiguous, but the operator asks for a stride of 1: copy.
        indices = torch.cat([initial_state_indices])
        return original(A_log, dt_bias, q, k, v, a, b, initial_state_source, indices, *args, **kwargs)

    return update


def _by_length(original):
    """`_spec_forward` for rows of any length: each length apart, in a window that it fills."""

    @wraps(original)
    def forward(layer, attn_metadata_i, mixed_qkv_spec, b_spec, a_spec, conv_buf, ssm_state, width, state_len):
        metadata = attn_metadata_i
        starts = metadata.spec_query_start_loc[: metadata.num_spec_decodes + 1]
        lengths = starts.diff()
        # The window holds width - 2 inputs of the past and one for each token of the longest row.
        longest = state_len - (width - 2)
        if bool((lengths == longest).all()):
            return original(layer, metadata, mixed_qkv_spec, b_spec, a_spec, conv_buf, ssm_state, width, state_len)
        results, order = [], []
        for length in lengths.unique().tolist():
            rows = (lengths == length).nonzero().flatten()
            tokens = (starts[rows].unsqueeze(1) + torch.arange(length)).flatten()
            columns = metadata.spec_state_indices_tensor[rows]
            accepted = metadata.num_accepted_tokens[rows]
            if length < longest:
                _move_to_front(conv_buf, ssm_state, columns, accepted, width - 1)
                accepted = torch.ones_like(accepted)
            part = replace(
                metadata,
                num_spec_decodes=len(rows),
                spec_state_indices_tensor=columns,
                spec_query_start_loc=torch.arange(len(rows) + 1, dtype=starts.dtype) * length,
                num_accepted_tokens=accepted,
            )
            filled = width - 2 + length
            inputs = (mixed_qkv_spec[tokens], b_spec[tokens], a_spec[tokens])
            results.append(original(layer, part, *inputs, conv_buf[:, :, :filled], ssm_state, width, filled))
            order.append(tokens)
        return torch.cat(results)[torch.cat(order).argsort()]

    return forward


def _move_to_front(conv_buf, ssm_state, columns, accepted, history: int) -> None:
    """Make each row's state, `accepted - 1` columns and inputs on, the one that a row with one accepted token has.

    conv_buf: [blocks, channels, inputs]; ssm_state: [blocks, ...]; columns: int [rows, drafts + 1], blocks.
    """
    for blocks, count in zip(columns.tolist(), accepted.tolist(), strict=True):
        if count > 1:
            window = conv_buf[blocks[0]]
            window[:, :history] = window[:, count - 1 : count - 1 + history].clone()
            ssm_state[blocks[0]] = ssm_state[blocks[count - 1]]


def _with_draftless_rows(original):
    """Pass a row without drafts as a verified row of one token if its state is not where an ordinary decode looks."""

    @wraps(original)
    def build(self, num_tokens, num_reqs, *args, use_spec_decode=False, **kwargs):
        if self.speculative_config is not None:
            drafts = self.num_decode_draft_tokens.np[:num_reqs]
            if not use_spec_decode:
                drafts[:] = -1  # What an earlier step left.
            moved = (drafts < 0) & (self.num_accepted_tokens.np[:num_reqs] > 1)
            if moved.any():
                # The builder looks at the sign, and whether the sum is 0; lengths come from elsewhere.
                drafts[moved] = 1
                use_spec_decode = True
        return original(self, num_tokens, num_reqs, *args, use_spec_decode=use_spec_decode, **kwargs)

    return build


def _with_skipped_requests(original):
    """Keep the count of accepted tokens of a running request while it is not in the batch."""

    @wraps(original)
    def update(self, scheduler_output):
        batch, cached = self.input_batch, scheduler_output.scheduled_cached_reqs
        before = dict(batch.req_id_to_index)
        for name, row in before.items():
            if name not in scheduler_output.num_scheduled_tokens:
                self.requests[name].accepted_before_skip = int(batch.num_accepted_tokens_cpu[row])
        result = original(self, scheduler_output)
        for name in cached.req_ids:
            # A preempted request that is resumed computes its state again.
            if name not in before and name not in cached.resumed_req_ids:
                accepted = self.requests[name].accepted_before_skip
                batch.num_accepted_tokens_cpu[batch.req_id_to_index[name]] = accepted
        return result

    return update
