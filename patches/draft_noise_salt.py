"""Drafts and residual resampling draw their Gumbel noise from different keys (V2 runner).

A draft for position Q and the token that replaces it when it is rejected are both sampled with noise keyed
(seed, Q-1). That the draft won says that the noise of the other tokens was low, and lowest where the draft model
thought much of them: the resampled token does not follow the residual distribution max(p - q, 0).
"""

import functools

from qwen38_3090.patches.patch import AppliesTo, Patch, Rebinding, Target

PATCH = Patch(
    name="draft_noise_salt",
    why="Sampled answers with speculation do not follow the model's distribution: after a rejected draft, tokens that "
    "the draft model likes are drawn too rarely.",
    targets=(
        Target("vllm.v1.worker.gpu.sample.gumbel:gumbel_sample", "47ee432624cd8a13"),
        Target("vllm.v1.worker.gpu.sample.gumbel:gumbel_block_argmax", "18dd9c70f9637861"),
        Target("vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils:_resample_kernel", "7864748f720095db"),
        Target("vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.sample_draft", "00fbb4a3e87009eb"),
        Target(
            "vllm.v1.worker.gpu.spec_decode.dspark.speculator:DSparkSpeculator._sample_sequential", "d2a7f69a9ced967f"
        ),
    ),
    upstream="#54282 (merged 2026-08-28, after 0.28.0)",
    retires_when="vLLM has #54282",
    switch="PATCH_DRAFT_NOISE_SALT",
    applies_to=AppliesTo(platforms=("cuda",), runners=("v2",), modes="speculation with probabilistic drafts"),
)

# Above every position (a context has fewer than 2**30 tokens), and position + salt still fits 32 bits.
DRAFT_NOISE_SALT = 1 << 30

_rebinding = Rebinding()


def apply() -> None:
    """Salt the noise of every draft; the target's sampler and the rejection sampler keep theirs."""
    # Each module that samples drafts holds its own name for gumbel_sample; every speculator goes through one of them.
    for module in ("speculator", "dspark.speculator"):
        _rebinding.wrap(f"vllm.v1.worker.gpu.spec_decode.{module}:gumbel_sample", _make_gumbel_sample)


def revert() -> None:
    """Give drafts their unsalted noise back."""
    _rebinding.undo()


def _make_gumbel_sample(original):
    @functools.wraps(original)
    def gumbel_sample(logits, expanded_idx_mapping, temperature, seed, pos, *args, **kwargs):
        # Inside the captured draft graph this is one more elementwise launch, as the caller's `positions + 1` is.
        return original(logits, expanded_idx_mapping, temperature, seed, pos + DRAFT_NOISE_SALT, *args, **kwargs)

    return gumbel_sample
