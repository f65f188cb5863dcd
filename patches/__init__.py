"""The registry of patches to vLLM 0.27.1: what is applied, in which order, and what state each is in.

`apply_all()` runs in every vLLM process through the `vllm.general_plugins` entry point. Nothing of vLLM is
imported here, so the launcher may read the registry too.
"""

import logging
import multiprocessing
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from qwen38_3090.patches.patch import Patch, PatchRefused, installed_platform, require_pinned_vllm

# Order of application. A name here is a module of this package.
REGISTRY: tuple[str, ...] = (
    "uniform_decode_guard",
    "gdn_accept_bounds",
    "align_block_size",
    "gdn_gate_gather",
    "hybrid_min_one_draft",
    "no_draft_padding_for_new_prompts",
    "draft_noise_salt",
    "cpu_mamba_align",
    "cpu_draftless_step",
    "cpu_sampled_drafts",
)

# Values of a patch's switch that turn it off.
OFF_VALUES = ("", "0", "off", "false", "no")

_applied: dict[str, ModuleType] = {}
_refused: dict[str, str] = {}

# A child of vLLM's logger: its lines carry vLLM's prefix, which names the process.
_logger = logging.getLogger("vllm.qwen38_3090")


@dataclass(frozen=True)
class State:
    """A patch's state in this process: "applied", "off", "not for this platform", "refused" or "not applied"."""

    patch: Patch
    state: str
    detail: str = ""


def modules() -> list[ModuleType]:
    """The patch modules, in order of application."""
    return [import_module(f"{__name__}.{name}") for name in REGISTRY]


def selected(environ: Mapping[str, str] = os.environ, platform: str | None = None) -> list[Patch]:
    """The patches that `apply_all()` would apply under these switches on this platform ("cuda" or "cpu")."""
    platform = platform or installed_platform()
    return [module.PATCH for module in modules() if _obstacle(module.PATCH, environ, platform) is None]


def apply_all(environ: Mapping[str, str] = os.environ) -> list[State]:
    """Apply every selected patch; idempotent. Logs one line. Raises PatchRefused before the first change if one does
    not fit the installed vLLM."""
    require_pinned_vllm()
    _refused.clear()
    platform = installed_platform()
    wanted = [m for m in modules() if _obstacle(m.PATCH, environ, platform) is None and m.PATCH.name not in _applied]
    for module in wanted:
        try:
            module.PATCH.verify()
        except PatchRefused as refusal:
            _refused[module.PATCH.name] = str(refusal)
            _logger.error("%s", refusal)
            raise
    for module in wanted:
        module.apply()
        _applied[module.PATCH.name] = module
    states = report(environ)
    if wanted:
        _logger.info("qwen38_3090 patches in %s (pid %d): %s", *_process(), _summary(states))
    return states


def revert_all() -> None:
    """Undo every applied patch, last first."""
    while _applied:
        _applied.popitem()[1].revert()


def report(environ: Mapping[str, str] = os.environ) -> list[State]:
    """The state of every patch in this process."""
    platform = installed_platform()
    states = []
    for module in modules():
        patch = module.PATCH
        if patch.name in _applied:
            states.append(State(patch, "applied"))
        elif patch.name in _refused:
            states.append(State(patch, "refused", _refused[patch.name]))
        else:
            states.append(State(patch, _obstacle(patch, environ, platform) or "not applied"))
    return states


def _obstacle(patch: Patch, environ: Mapping[str, str], platform: str) -> str | None:
    if environ.get(patch.switch, "1").strip().lower() in OFF_VALUES:
        return "off"
    if platform not in patch.applies_to.platforms:
        return "not for this platform"
    return None


def _process() -> tuple[str, int]:
    return multiprocessing.current_process().name, os.getpid()


def _summary(states: list[State]) -> str:
    groups: dict[str, list[str]] = {}
    for state in states:
        groups.setdefault(state.state, []).append(state.patch.name)
    return "; ".join(f"{state}: {', '.join(names)}" for state, names in groups.items())
