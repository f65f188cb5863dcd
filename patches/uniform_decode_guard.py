"""A captured verify graph is replayed for decodes only, never for a prefill chunk of the same length.

vLLM takes a batch for "uniform decode" from its shape: every request has 1 + drafts tokens. A prompt, or a last
prefill chunk, of that many tokens has the shape too. The GDN builder sees a prefill and leaves the graph's state
indices as the batch before set them, so the replay reads and writes the recurrent states of other requests.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from qwen38_3090.patches.patch import AppliesTo, Patch, Rebinding, Target

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

PATCH = Patch(
    name="uniform_decode_guard",
    why="A prompt whose last chunk has exactly drafts+1 tokens is answered with garbage, and cached prefixes of other "
    "requests are overwritten.",
    targets=(
        Target("vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model", "1644a146e0165aa1"),
        Target("vllm.v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs", "9dbd5de665d43d53"),
        Target(
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner._determine_batch_execution_and_padding", "63e71096e037e04b"
        ),
        Target("vllm.v1.worker.gpu_model_runner:GPUModelRunner._dummy_run", "1239fc917351f0bc"),
        Target("vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model", "feaf2e032c8a4b93"),
        Target("vllm.v1.worker.gpu.model_runner:GPUModelRunner.update_requests", "9935e792ee4a2f1a"),
        Target("vllm.v1.worker.gpu.cudagraph_utils:get_uniform_token_count", "ab88bc1d0cd0ea7f"),
        Target(
            "vllm.v1.worker.gpu.spec_decode.autoregressive.speculator:AutoRegressiveSpeculator.propose",
            "de4caa3ef9f545f3",
        ),
        Target("vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder.build", "0bd8602dfc6ae79c"),
    ),
    upstream="#49918, #53051 (open); V2 fixed in 0.28.0, V1 in #47123, #53059 (open, 2026-09)",
    retires_when="vLLM decides by the requests' state, not by shape, on both runners",
    switch="PATCH_UNIFORM_DECODE_GUARD",
    applies_to=AppliesTo(platforms=("cuda",), modes="all with FULL CUDA graphs"),
)

_rebinding = Rebinding()


class _Step:
    """The step that the V2 runner is in: whether it holds decodes only; None in a dummy run."""

    only_decodes: bool | None = None


def apply() -> None:
    """Dispatch a step to a captured decode graph only if every request in it decodes."""
    v1 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
    _rebinding.wrap(f"{v1}._prepare_inputs", _make_prepare_inputs)
    _rebinding.wrap(f"{v1}._determine_batch_execution_and_padding", _make_determine)
    v2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
    _rebinding.wrap(f"{v2}.execute_model", _make_execute_model)
    _rebinding.wrap(f"{v2}.update_requests", _make_update_requests)
    _rebinding.wrap(
        "vllm.v1.worker.gpu.cudagraph_utils:get_uniform_token_count",
        _make_get_uniform_token_count,
        # The speculators' draft prefill reuses the target's attention metadata: FULL only where the target is.
        holders=(
            "vllm.v1.worker.gpu.model_runner",
            "vllm.v1.worker.gpu.spec_decode.autoregressive.speculator",
            "vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator",
        ),
    )
    _rebinding.wrap("vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder.build", _make_build)


def revert() -> None:
    """Put vLLM's own functions back."""
    _rebinding.undo()
    _Step.only_decodes = None


def only_decodes(
    scheduler_output: "SchedulerOutput", is_prefilling: Callable[[str], bool], tokens_without_drafts: int = 1
) -> bool:
    """Whether every scheduled request decodes.

    A request decodes if its tokens are its drafts and the token before them, and its prompt is computed. The first
    half alone finds a request that resumes after preemption, whose outputs are prefilled again; the second alone finds
    a chunk of one token.
    """
    drafts = scheduler_output.scheduled_spec_decode_tokens
    return all(
        num_tokens == tokens_without_drafts + len(drafts.get(req_id, ())) and not is_prefilling(req_id)
        for req_id, num_tokens in scheduler_output.num_scheduled_tokens.items()
    )


def _make_prepare_inputs(original):
    @functools.wraps(original)
    def _prepare_inputs(self, scheduler_output, *args, **kwargs):
        batch = self.input_batch

        def is_prefilling(req_id: str) -> bool:
            row = batch.req_id_to_index[req_id]
            return batch.num_computed_tokens_cpu[row] < batch.num_prompt_tokens[row]

        self._step_only_decodes = only_decodes(scheduler_output, is_prefilling)
        return original(self, scheduler_output, *args, **kwargs)

    return _prepare_inputs


def _make_determine(original):
    @functools.wraps(original)
    def _determine_batch_execution_and_padding(self, *args, **kwargs):
        # Taken once: a dummy or capture run, which prepares no inputs, decides as before.
        if vars(self).pop("_step_only_decodes", None) is False:
            kwargs.setdefault("force_uniform_decode", False)
        return original(self, *args, **kwargs)

    return _determine_batch_execution_and_padding


def _make_execute_model(original):
    @functools.wraps(original)
    def execute_model(self, *args, **kwargs):
        _Step.only_decodes = None
        return original(self, *args, **kwargs)

    return execute_model


def _make_update_requests(original):
    @functools.wraps(original)
    def update_requests(self, scheduler_output):
        original(self, scheduler_output)
        states = self.req_states

        def is_prefilling(req_id: str) -> bool:
            row = states.req_id_to_index[req_id]
            return states.num_computed_prefill_tokens[row] < states.prefill_len.np[row]

        _Step.only_decodes = only_decodes(
            scheduler_output, is_prefilling, self.model_state.num_new_sampled_tokens_per_step
        )

    return update_requests


def _make_get_uniform_token_count(original):
    @functools.wraps(original)
    def get_uniform_token_count(num_reqs, num_tokens, max_query_len):
        if _Step.only_decodes is False:
            return None
        return original(num_reqs, num_tokens, max_query_len)

    return get_uniform_token_count


def _make_build(original):
    @functools.wraps(original)
    def build(self, *args, **kwargs):
        metadata = original(self, *args, **kwargs)
        if metadata.num_prefills and self.use_spec_decode and self.use_full_cuda_graph:
            # A belt: a graph replayed by mistake now meets the null block, not another request's. Sound: whoever reads
            # the buffer does so after a build that fills its rows, and this build's metadata holds copies. Race-free:
            # same stream. Cheap: one fill of a few KiB, in steps that prefill.
            self.spec_state_indices_tensor.zero_()
        return metadata

    return build
