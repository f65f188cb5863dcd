"""A hybrid model's running decode is verified with drafts at every step.

A verify step leaves one recurrent state after each of its tokens, in columns 0, 1, 2, ... of a request's state blocks.
When it accepts a tokens, the state to go on from lies in column a - 1. A row with drafts starts there; a row without
drafts (`GDNAttentionMetadataBuilder.build`) always starts from column 0 and so forgets a - 1 tokens. The V1 runner
forgets them also when a step leaves a running decode out (`InputBatch.add_request` sets the count back to one).

Where vLLM 0.27.1's scheduler does either, and what closes it here:

- No draft passes the grammar, or the drafter has none, under synchronous scheduling: the block is filled with -1 to
  the length of the drafter's longest. Asynchronous scheduling does the same itself. -1 is a draft that every runner
  rejects: V1 clamps it to 0 for the embedding only, its rejection kernels and the grammar's bitmask know it, and V2
  reads its own drafts, of which the first that the grammar forbids has probability 0. Only the CPU's C++ kernel for
  sampled requests reads the probability of token -1; it gets a draft that it cannot accept instead.
- A prompt's chunk takes what a step has for a decode behind it: decodes come first.
- The running decodes alone need more than a step has: fewer requests run at once.
- Speculation by batch size asks for no drafts: it gets one.
- The context ends before a second token fits. A request then stops there: one token short of the limit, or K + 2
  tokens with asynchronous scheduling, which plans a step before it knows what the last one accepted. On the CPU
  `cpu_draftless_step` makes rows without drafts right, so requests may go to the limit.

Not closed: a pause that keeps requests and a preemption by priority (both V1), `--long-prefill-token-threshold` below
2, and `min_tokens` beyond the context's limit.
"""

from functools import wraps

from qwen38_3090.patches.patch import AppliesTo, Patch, Rebinding, Target

PATCH = Patch(
    name="hybrid_min_one_draft",
    why="Without it JSON schemas and tool calls can lose tokens from the model's memory, and the answer derails.",
    targets=(
        Target("vllm.v1.core.sched.scheduler:Scheduler.__init__", "d1a9f7cb908975df"),
        Target("vllm.v1.core.sched.scheduler:Scheduler.schedule", "c4b261b417b7fa7e"),
        Target("vllm.v1.core.sched.scheduler:Scheduler.update_draft_token_ids", "6e8e4e91a6850f0f"),
        Target("vllm.v1.core.sched.scheduler:Scheduler._update_request_with_output", "ffcaec8de9837fe0"),
        Target("vllm.v1.core.sched.async_scheduler:AsyncScheduler", "2126d226c56a363b"),
        Target("vllm.v1.core.sched.utils:check_stop", "4896b4b5aec97e80"),
        Target("vllm.v1.structured_output:StructuredOutputManager.grammar_bitmask", "18dd774e8e3057e8"),
        Target("vllm.v1.attention.backends.gdn_attn:GDNAttentionMetadataBuilder.build", "0bd8602dfc6ae79c"),
        Target("vllm.v1.worker.gpu_input_batch:InputBatch.update_req_spec_token_ids", "5d37210de4e52fc0"),
        Target("vllm.v1.worker.gpu_model_runner:GPUModelRunner._preprocess", "4447de9ee7573fdf"),
        Target("vllm.v1.sample.rejection_sampler:rejection_greedy_sample_kernel", "106bf82c261c6a28"),
        Target("vllm.v1.sample.rejection_sampler:rejection_random_sample_kernel", "82b20c180407754e"),
        Target("vllm.v1.sample.rejection_sampler:sample_recovered_tokens_kernel", "4ec2a810d3d81a20"),
        Target("vllm.utils.cpu_triton_utils:_rejection_random_sample_kernel_impl", "920411fc44274d2d"),
        Target("vllm.utils.cpu_triton_utils:_FuncWrapper", "435440d2196424e0"),
    ),
    upstream="#40875 (issue, open), #56531 (open, 2026-09)",
    retires_when="the GDN backend starts a row without drafts from the column of its last accepted token",
    switch="PATCH_HYBRID_MIN_ONE_DRAFT",
    applies_to=AppliesTo(modes="speculation on a hybrid model"),
)

REJECTED = -1

_rebinding = Rebinding()


def apply() -> None:
    """Wrap the scheduler's constructor, step and stop, and the CPU's rejection kernel."""
    scheduler = "vllm.v1.core.sched.scheduler:Scheduler"
    _rebinding.wrap(f"{scheduler}.__init__", _with_room_for_every_decode)
    _rebinding.wrap(f"{scheduler}.update_draft_token_ids", _remember_length)
    _rebinding.wrap(f"{scheduler}.schedule", _with_full_blocks)
    _rebinding.wrap(f"{scheduler}._update_request_with_output", _stop_while_a_draft_fits)
    _rebinding.wrap("vllm.utils.cpu_triton_utils:rejection_random_sample_kernel", _reject_padding)


def revert() -> None:
    """Put vLLM's own functions back."""
    _rebinding.undo()


def _with_room_for_every_decode(original):
    @wraps(original)
    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.draft_length = self.num_spec_tokens
        if not _keeps_states(self):
            return
        if self.dynamic_sd_lookup is not None:
            self.dynamic_sd_lookup = [max(drafts, 1) for drafts in self.dynamic_sd_lookup]
        block = 1 + self.num_spec_tokens
        fitting = self.max_num_scheduled_tokens // block
        if not fitting:
            raise ValueError(
                f"a step of {self.max_num_scheduled_tokens} tokens cannot verify {self.num_spec_tokens} drafts: "
                f"set --max-num-batched-tokens to {block} or more"
            )
        self.max_num_running_reqs = min(self.max_num_running_reqs, fitting)

    return init


def _remember_length(original):
    @wraps(original)
    def update_draft_token_ids(self, draft_token_ids):
        # Before the grammar shortens them.
        self.draft_length = max([1, *map(len, draft_token_ids.draft_token_ids)])
        original(self, draft_token_ids)

    return update_draft_token_ids


def _with_full_blocks(original):
    @wraps(original)
    def schedule(self, *args, **kwargs):
        if not _keeps_states(self):
            return original(self, *args, **kwargs)
        padding = _pad(self)
        # A stable sort: among themselves decodes and prompts keep their order.
        self.running.sort(key=lambda request: request.is_prefill_chunk)
        output = original(self, *args, **kwargs)
        scheduled = {name: count for name, count in padding.items() if name in output.scheduled_spec_decode_tokens}
        if scheduled:
            # Padding counts neither as drafted nor as rejected.
            output.num_invalid_spec_tokens = scheduled
        return output

    return schedule


def _stop_while_a_draft_fits(original):
    @wraps(original)
    def update(self, *args, **kwargs):
        limit = self.max_model_len
        self.max_model_len -= _tokens_kept_free(self)
        try:
            return original(self, *args, **kwargs)
        finally:
            self.max_model_len = limit

    return update


def _reject_padding(original):
    from vllm.utils.cpu_triton_utils import _FuncWrapper

    launch = original.func

    @wraps(launch)
    def kernel(output, cu_drafts, drafts, draft_probs, target_probs, bonus, recovered, uniform, *args, **kwargs):
        padding = drafts < 0
        if padding.any():
            # Its ratio of probabilities is finite, and the number to reach is not.
            likely = 0 if draft_probs is None else draft_probs.argmax(dim=-1).to(drafts.dtype)
            drafts = drafts.where(~padding, likely)
            uniform = uniform.masked_fill(padding, float("inf"))
        launch(output, cu_drafts, drafts, draft_probs, target_probs, bonus, recovered, uniform, *args, **kwargs)

    return _FuncWrapper(kernel)


def _keeps_states(scheduler) -> bool:
    """Whether the scheduler serves a model with recurrent layers, with drafts to verify."""
    return scheduler.has_mamba_layers and scheduler.num_spec_tokens > 0 and scheduler.num_sampled_tokens_per_step > 0


def _pad(scheduler) -> dict[str, int]:
    """Fill the blocks of the running decodes; returns how many drafts were added by request."""
    padding = {}
    if scheduler.scheduler_config.async_scheduling:
        return padding
    for request in scheduler.running:
        missing = scheduler.draft_length - len(request.spec_token_ids)
        if missing > 0 and not request.is_prefill_chunk:
            request.spec_token_ids = [*request.spec_token_ids, *[REJECTED] * missing]
            padding[request.request_id] = missing
    return padding


def _tokens_kept_free(scheduler) -> int:
    from vllm.platforms import current_platform

    if current_platform.is_cpu() or not _keeps_states(scheduler):
        return 0
    unknown = scheduler.vllm_config.max_concurrent_batches - 1
    return 1 + unknown * (1 + scheduler.num_spec_tokens)
