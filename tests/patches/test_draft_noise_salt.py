"""Noise of drafts and of resampled tokens on the V2 runner, through vLLM's speculators and sampling kernels."""

import inspect
from types import SimpleNamespace

import numpy as np
import pytest
import torch

# numpy computes, and warns of, what a kernel's masks then drop.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Chosen for a strong coupling: token 0 is drafted half the time and then replaced, by token 1, which the draft model
# likes, or by token 2, which it does not know.
TARGET = torch.tensor([0.0026, 0.7011, 0.2963])
DRAFT = torch.tensor([0.4939, 0.5051, 0.0010])
ROWS = 100_000 if DEVICE.type == "cuda" else 220  # requests for each temperature
LIMIT = 16.0  # chi-square, 1 degree of freedom, p = 6e-5


def speculator(cls, logits, seeds, temperature=1.0, steps=1):
    """A speculator of this class without its model: `logits` [requests * steps, vocabulary] stand for the model's."""
    requests = len(seeds)
    self = cls.__new__(cls)
    self.num_speculative_steps, self.use_fp64_gumbel, self.use_local_argmax_reduction = steps, False, False
    self.temperature = torch.full((requests,), temperature, device=DEVICE)
    self.seeds = seeds
    self.idx_mapping = torch.arange(requests, dtype=torch.int32, device=DEVICE)
    self.draft_tokens = torch.zeros(requests, steps, dtype=torch.int64, device=DEVICE)
    self.draft_logits = torch.zeros(requests, steps, logits.shape[-1], device=DEVICE)
    self.model = SimpleNamespace(compute_logits=lambda _: logits)
    return self


def mtp_drafts(logits, seeds, predicted, temperature=1.0):
    """The first draft of MTP and EAGLE for the given positions."""
    from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator

    self = speculator(MTPSpeculator, logits, seeds, temperature)
    rows = torch.arange(len(seeds), device=DEVICE)
    self.last_token_indices, self.current_draft_step = rows, torch.tensor(0, device=DEVICE)
    self.input_buffers = SimpleNamespace(positions=predicted - 2)
    self.hidden_states = torch.zeros(len(seeds), 1, device=DEVICE)
    self._run_model = lambda *_, **__: (self.hidden_states, self.hidden_states)
    self._prefill(len(seeds), len(seeds), None, None, None)
    return self


def dflash_drafts(logits, seeds, predicted):
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator

    self = speculator(DFlashSpeculator, logits, seeds)
    self.sample_indices = torch.arange(len(seeds), device=DEVICE)
    self.sample_pos, self.sample_idx_mapping = predicted, self.idx_mapping
    self.sample_col = torch.zeros(len(seeds), dtype=torch.int64, device=DEVICE)
    self._run_model = lambda *_, **__: torch.zeros(len(seeds), 1, device=DEVICE)
    self._generate_draft(len(seeds), len(seeds), None, None, None)
    return self


def dspark_drafts(logits, seeds, predicted):
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator

    self = speculator(DSparkSpeculator, logits, seeds)
    rows = torch.arange(len(seeds), device=DEVICE)
    self.sample_indices, self._anchor_idx, self._step_cols = (
        rows,
        rows,
        torch.zeros(1, dtype=torch.int32, device=DEVICE),
    )
    self.sample_pos, self.sample_idx_mapping = predicted, self.idx_mapping
    self.input_buffers = SimpleNamespace(input_ids=torch.zeros_like(rows))
    self._d2t_scatter_index = None
    self.model = SimpleNamespace(
        compute_draft_logits=lambda _: logits, markov_embed=lambda _: None, markov_bias=lambda _: 0.0
    )
    self._sample_sequential(len(seeds), torch.zeros(len(seeds), 1, device=DEVICE))
    return self


def verify(drafts, target_logits, predicted):
    """Emitted tokens [requests] and whether the draft was accepted, by vLLM's rejection sampler."""
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    requests = len(predicted)
    sampled = torch.zeros(2 * requests, dtype=torch.int64, device=DEVICE)
    sampled[1::2] = drafts.draft_tokens[:, 0]
    tokens, num_sampled = rejection_sample(
        target_logits.repeat_interleave(2, 0),
        drafts.draft_logits,
        sampled,
        torch.arange(requests + 1, dtype=torch.int32, device=DEVICE) * 2,
        torch.stack([predicted - 1, predicted], 1).flatten(),
        drafts.idx_mapping,
        drafts.idx_mapping.repeat_interleave(2),
        torch.arange(2, dtype=torch.int32, device=DEVICE).repeat(requests),
        drafts.temperature,
        drafts.seeds,
        1,
    )
    return tokens[:, 0], num_sampled == 2


def requests(count, seed):
    """Seeds and predicted positions of `count` requests."""
    rng = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randint(low, high, (count,), generator=rng).to(DEVICE) for low, high in ((0, 2**62), (2, 262_144))
    )


@pytest.mark.parametrize("draw", [mtp_drafts, dflash_drafts, dspark_drafts])
def test_drafts_and_resampled_tokens_share_no_noise(patched, draw, monkeypatch):
    """A rejected draft is replaced by the token whose noise is highest; a draft of a flat model is that token too."""
    speed_up_interpreter(monkeypatch)
    seeds, predicted = requests(16, seed=0)
    flat = torch.zeros(16, 64, device=DEVICE)
    flat[:, 0] = -1e4
    certain = -flat - 1e4  # a draft model that is sure of token 0, which the target rules out

    def agreement():
        drafted = draw(flat, seeds, predicted).draft_tokens[:, 0]
        rejected = draw(certain, seeds, predicted)
        assert (rejected.draft_tokens == 0).all()
        emitted, accepted = verify(rejected, flat, predicted)
        assert not accepted.any()
        return (drafted == emitted).float().mean().item()

    assert agreement() == 1.0, "stock 0.27.1 no longer uses one key for both"
    with patched("draft_noise_salt"):
        assert agreement() < 0.25


def chi_square(count, total, probability):
    return ((count - total * probability) ** 2 / (total * probability * (1 - probability))).item()


def deviations(counts):
    """Chi-squares of the number of accepted drafts (sum of min(p, q)) and of what replaces the rest (max(p - q, 0))."""
    accepted, replaced = counts[:3], counts[3:]
    residual = (TARGET - DRAFT).clamp(min=0)
    assert replaced[0] == 0, "token 0 has no residual"
    return (
        chi_square(accepted.sum(), counts.sum(), torch.minimum(TARGET, DRAFT).sum()),
        chi_square(replaced[1], replaced.sum(), residual[1] / residual.sum()),
    )


def emitted(temperature):
    """Counts [accepted 0..2, replaced 0..2] for ROWS requests; at this temperature p is TARGET and q is DRAFT."""
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature

    seeds, predicted = requests(ROWS, seed=int(10 * temperature))
    raw = [(temperature * part.log()).to(DEVICE).expand(ROWS, -1).contiguous() for part in (DRAFT, TARGET)]
    drafts = mtp_drafts(raw[0], seeds, predicted, temperature)
    apply_temperature(raw[1], drafts.idx_mapping, drafts.temperature)
    tokens, accepted = verify(drafts, raw[1], predicted)
    return torch.bincount(tokens + 3 * ~accepted, minlength=6).cpu()


def test_emitted_tokens_follow_the_target(patched, monkeypatch):
    speed_up_interpreter(monkeypatch)
    temperatures = (0.5, 1.0, 1.7)
    accepted, replaced = deviations(sum(emitted(temperature) for temperature in temperatures))
    assert accepted < LIMIT
    assert replaced > 1.5 * LIMIT, "stock 0.27.1 no longer draws replacements from the wrong distribution"
    with patched("draft_noise_salt"):
        counts = [emitted(temperature) for temperature in temperatures]
    for temperature, one in zip(temperatures, counts, strict=True):
        assert max(deviations(one)) < LIMIT, f"temperature {temperature}"
    assert max(deviations(sum(counts))) < LIMIT


def test_greedy_drafts_and_the_sampler_are_left_alone(patched):
    from vllm.v1.worker.gpu.sample import gumbel, sampler
    from vllm.v1.worker.gpu.spec_decode import speculator as module

    seeds, predicted = requests(4, seed=0)
    logits = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    with patched("draft_noise_salt"):
        assert module.gumbel_sample is not gumbel.gumbel_sample
        assert sampler.gumbel_sample is gumbel.gumbel_sample
        greedy = mtp_drafts(logits, seeds, predicted, temperature=0.0)
        assert greedy.draft_tokens[:, 0].tolist() == logits.argmax(-1).tolist()
    assert module.gumbel_sample is gumbel.gumbel_sample


def test_every_speculator_samples_through_the_salted_name():
    """A speculator with a sampling of its own would escape the patch."""
    from vllm.v1.worker.gpu.spec_decode import speculator
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
    from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
    from vllm.v1.worker.gpu.spec_decode.gemma4.speculator import Gemma4Speculator
    from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator
    from vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator import MultiModuleMTPSpeculator

    for cls in (DFlashSpeculator, EagleSpeculator, Gemma4Speculator, MTPSpeculator, MultiModuleMTPSpeculator):
        assert cls.sample_draft is speculator.DraftModelSpeculator.sample_draft


def test_fast_interpreter_changes_nothing(monkeypatch):
    seeds, predicted = requests(16, seed=1)
    flat = torch.zeros(16, 256, device=DEVICE)
    before = mtp_drafts(flat, seeds, predicted).draft_tokens
    speed_up_interpreter(monkeypatch)
    assert torch.equal(before, mtp_drafts(flat, seeds, predicted).draft_tokens)


def speed_up_interpreter(monkeypatch):
    """Three times the speed: Philox in numpy, and Triton's builtins looked up once, not at each call of a function."""
    import triton.language as tl
    from triton.language import core
    from triton.runtime import interpreter

    if DEVICE.type == "cuda":
        return
    builtins = {}

    def patch_builtin(package, builder, scope):
        if package not in builtins:
            builtins[package] = [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]
        for name in builtins[package]:
            if core.is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    def block(values, dtype, like):
        kind = core.block_type(dtype, like.type.get_block_shapes()) if like.type.is_block() else dtype
        return core.tensor(interpreter.TensorHandle(values, dtype), kind)

    def randint(seed, offset):
        return block(philox(seed.handle.data, offset.handle.data), core.uint32, offset)

    def rand(seed, offset):
        bits = philox(seed.handle.data, offset.handle.data).view(np.int32)
        uniform = np.where(bits < 0, -bits - 1, bits).astype(np.float32) * np.float32(4.6566127342e-10)
        return block(uniform, core.float32, offset)

    monkeypatch.setattr(interpreter, "_patch_builtin", patch_builtin)
    monkeypatch.setattr(tl, "randint", randint)
    monkeypatch.setattr(tl, "rand", rand)


def philox(seed, offset):
    """First word (uint32) of Philox-4x32-10 for 64-bit seeds and offsets from 0 on."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    seed, offset = seed.astype(np.uint64), offset.astype(np.uint64)
    c0, c1 = offset & low, offset >> half
    c2 = c3 = np.zeros_like(c0)
    k0, k1 = seed & low, seed >> half
    for _ in range(10):
        a, b = np.uint64(0xCD9E8D57) * c2, np.uint64(0xD2511F53) * c0
        c0, c1, c2, c3 = (a >> half) ^ c1 ^ k0, a & low, (b >> half) ^ c3 ^ k1, b & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return c0.astype(np.uint32)
