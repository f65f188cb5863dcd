"""An MTP module that a quantized checkpoint holds in bf16 but does not list as ignored.

The published W4A16 checkpoint is such a one: vLLM then builds packed MTP layers and finds no tensors for them. The list
is completed in memory, for the target's config and for the drafter's; the file stays as it is.
"""

import re
from pathlib import Path
from typing import Any

from qwen38_3090.checks import read_json, tensor_names


def forgotten_modules(directory: Path) -> tuple[str, ...]:
    """Names of the MTP matrices of a quantized checkpoint that are neither packed nor listed in
    `quantization_config.ignore`. Raises SettingError for damaged files."""
    quantization = read_json(directory / "config.json").get("quantization_config")
    if not quantization:
        return ()
    listed = quantization.get("ignore") or ()
    modules = {name.removesuffix(".weight") for name in tensor_names(directory) if name.endswith(".weight")}
    matrices = {name for name in modules if name.startswith("mtp.") and name.endswith(("_proj", ".fc"))}
    return tuple(sorted(name for name in matrices if not any(names_module(entry, name) for entry in listed)))


def names_module(target: str, module: str) -> bool:
    """Whether a target of quantization_config names the module. Patterns are for vLLM's names, paths for the file's."""
    if target.startswith("re:"):
        return re.match(target[3:], re.sub(r"^model\.language_model\.", "language_model.model.", module)) is not None
    return target == module


class IgnoreModules:
    """An `hf_overrides` for vLLM that lists `modules` as ignored, after the user's own overrides.

    A callable, because only that reaches the drafter's config too; a class, because vLLM's processes unpickle it.
    """

    def __init__(self, modules: tuple[str, ...], overrides: dict[str, Any] | None = None) -> None:
        self.modules = modules
        self.overrides = overrides or {}

    def __call__(self, hf_config: Any) -> Any:
        hf_config.update(self.overrides)
        quantization = getattr(hf_config, "quantization_config", None)
        if quantization is not None:
            ignored = quantization.setdefault("ignore", [])
            ignored += [module for module in self.modules if module not in ignored]
        return hf_config
