"""Every patch: its targets are those of vLLM 0.27.1, and in this process it really replaced what it names."""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from types import ModuleType

from qwen38_3090 import patches, plugin
from qwen38_3090.doctor.finding import FAIL, PASS, SKIP, WARN, Finding
from qwen38_3090.patches.patch import PatchRefused, Rebinding

_found = partial(Finding, "patches")

_REINSTALL = "Make the environment anew: `rm -rf .venv && bash scripts/setup.sh`."

# What importing a module of vLLM's CUDA build may raise where there is no GPU or no driver.
_IMPORT_ERRORS = (ImportError, OSError, RuntimeError, AttributeError)


def check(importable: bool = True) -> Iterator[Finding]:
    """Apply the patches as vLLM's plugin does and report on each.

    importable: every module of vLLM can be imported here, as it can where vLLM serves.
    """
    plugin.early()
    try:
        with suppress(PatchRefused):  # what refuses says so below
            plugin.register()
    except _IMPORT_ERRORS as error:
        detail = f"vLLM can't be imported ({type(error).__name__}: {error})"
        yield _found("all", FAIL, detail, _REINSTALL)
        return
    for module, state in zip(patches.modules(), patches.report(), strict=True):
        yield _one(module, state, importable)


def _one(module: ModuleType, state: patches.State, importable: bool) -> Finding:
    patch = module.PATCH
    if state.state == "off":
        return _found(patch.name, WARN, f"off. {patch.why}", f"Unset {patch.switch}, unless you meant it.")
    if state.state == "not for this platform":
        return _found(patch.name, SKIP, f"for {' and '.join(patch.applies_to.platforms)} only")
    try:
        patch.verify()
    except PatchRefused as refusal:
        remedy = f"{_REINSTALL} Or run without this patch: {patch.switch}=0."
        return _found(patch.name, FAIL, str(refusal).partition("; ")[0], remedy)
    if state.state != "applied":
        return _found(patch.name, SKIP, "its targets fit, but nothing is applied while another patch refuses")
    return _replaced(module, importable)


def _replaced(module: ModuleType, importable: bool) -> Finding:
    """Import all that an applied patch waits for, then look at what stands under the names it replaces."""
    patch = module.PATCH
    rebindings = [value for value in vars(module).values() if isinstance(value, Rebinding)]
    failed = {}
    for name in dict.fromkeys(name for rebinding in rebindings for name in rebinding.awaited):
        try:
            import_module(name)
        except (*_IMPORT_ERRORS, PatchRefused) as error:
            failed[name] = f"{name} ({type(error).__name__}: {error})"
    bound = sum(rebinding.bound for rebinding in rebindings)
    lost = [name for rebinding in rebindings for name in rebinding.lost]
    detail = f"applied; targets that are as in vLLM 0.27.1: {len(patch.targets)}, names replaced: {bound}"
    if lost:
        remedy = "Find what else changes vLLM here: another plugin, or an import of its own."
        return _found(patch.name, FAIL, f"{', '.join(lost)} was replaced again by something else", remedy)
    if failed and importable:
        return _found(patch.name, FAIL, f"vLLM's modules can't be imported: {'; '.join(failed.values())}", _REINSTALL)
    if failed:
        return _found(patch.name, SKIP, f"{detail}; not importable without a GPU: {', '.join(failed)}")
    if not bound:
        return _found(patch.name, FAIL, "applied, but it replaced nothing", "Report this: the patch has no effect.")
    return _found(patch.name, PASS, detail)
