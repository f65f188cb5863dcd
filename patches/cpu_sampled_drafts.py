"""On the CPU, a sampled request with drafts is sampled at its own temperature, top-k and top-p.

Before it verifies drafts, V1's rejection sampler repeats each request's temperature, top-k and top-p for each of its
drafts with `expand_kernel`. The CPU's stand-in for that kernel writes into int64 copies of its arguments: what it
should fill stays as the allocator left it, and the logits are divided by that.
"""

import torch
from qwen38_3090.patches.patch import AppliesTo, Patch, Rebinding, Target

PATCH = Patch(
    name="cpu_sampled_drafts",
    why="Without it a server on the CPU with speculation answers sampled requests with garbage.",
    targets=(
        Target("vllm.utils.cpu_triton_utils:_expand_kernel_impl", "1f122c8d3c9517aa"),
        Target("vllm.utils.cpu_triton_utils:_FuncWrapper", "435440d2196424e0"),
        Target("vllm.v1.sample.rejection_sampler:expand_batch_to_tokens", "32241a2d808c1904"),
        Target("vllm.v1.sample.rejection_sampler:expand_kernel", "c7826060724985bb"),
        Target("vllm.v1.worker.cpu_model_runner:CPUModelRunner._postprocess_triton", "676d6d58df29a399"),
    ),
    upstream="none found (2026-09)",
    retires_when="_expand_kernel_impl copies its result into the output",
    switch="PATCH_CPU_SAMPLED_DRAFTS",
    applies_to=AppliesTo(platforms=("cpu",), runners=("v1",), modes="speculation"),
)

_rebinding = Rebinding()


def apply() -> None:
    """Put a stand-in for expand_kernel in the place of vLLM's."""
    _rebinding.wrap("vllm.utils.cpu_triton_utils:expand_kernel", lambda _: _launchable(_expand))


def revert() -> None:
    """Put vLLM's stand-in back."""
    _rebinding.undo()


def _launchable(body):
    from vllm.utils.cpu_triton_utils import _FuncWrapper

    return _FuncWrapper(body)


def _expand(output, values, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS=None) -> None:
    """output [num_tokens] = values [num_reqs], each as often as its request has tokens; cu_num_tokens [num_reqs] int,
    the running total. A value equal to replace_from counts as replace_to."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    output.copy_(values.masked_fill(values == replace_from, replace_to).repeat_interleave(counts))
