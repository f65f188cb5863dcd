"""Settings + mode -> the vLLM command, its environment and the patches: a pure function."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qwen38_3090 import patches
from qwen38_3090.demo import MODEL_DIR
from qwen38_3090.modes import Mode, load
from qwen38_3090.settings import OFF, SettingError, Settings, names

PLUGINS = ("qwen38_3090", "qwen38_3090_early")


@dataclass(frozen=True)
class Machine:
    """What matters of the machine: which vLLM build is installed ("cuda" or "cpu"), and whether it is WSL2."""

    stack: str
    wsl2: bool = False


@dataclass(frozen=True)
class Launch:
    """How to start vLLM: its options, the environment to set, the names of the patches, and remarks for the user."""

    mode: str
    context: str
    argv: list[str]
    env: dict[str, str]
    patches: list[str]
    notes: list[str] = field(default_factory=list)


def launch(
    settings: Settings, machine: Machine, environ: Mapping[str, str], vllm_arguments: Sequence[str] = ()
) -> Launch:
    """Resolve the settings.

    environ: the environment, whose own values win over a mode's. vllm_arguments: options that go to vLLM unchanged,
    after ours and after EXTRA_ARGS, so that they win. Raises SettingError.
    """
    name = settings.mode or {"cuda": "single", "cpu": "demo"}[machine.stack]
    mode = load(name)
    if mode.stack != machine.stack:
        build = {"cuda": "CUDA", "cpu": "CPU"}
        raise SettingError(
            f"MODE={name} needs vLLM's {build[mode.stack]} build, but the {build[machine.stack]} build is installed: "
            f"run `bash scripts/setup.sh {mode.stack}` and start with the Python it prints, or set another MODE."
        )
    _refuse_what_comes_later(settings, mode)
    ctx = settings.ctx or mode.defaults.ctx
    context = mode.contexts[ctx]
    if context.later:
        raise SettingError(context.later)

    notes: list[str] = []
    options: dict[str, Any] = {"model": settings.model or mode.model or str(MODEL_DIR)}
    options["served-model-name"] = mode.served_names
    options["host"] = settings.listen or ("0.0.0.0" if settings.api_key else "127.0.0.1")
    options["port"] = settings.port
    options |= mode.arguments
    options["max-model-len"] = _or(settings.max_len, context.max_len)
    options["max-num-seqs"] = _or(settings.max_seqs, mode.defaults.max_seqs)
    env = dict(mode.environment)
    options |= _memory(settings, mode, machine, notes)
    options |= _kv(settings, mode, context.kv)
    options |= _prefix_cache(settings, mode)
    options |= _speculation(settings, mode, ctx, notes)
    if mode.defaults.tools if settings.tools is None else settings.tools:
        options |= {"enable-auto-tool-choice": True, "tool-call-parser": "qwen3_coder"}
    if options["host"] not in ("127.0.0.1", "localhost", "::1") and not settings.api_key:
        notes.append(f"no VLLM_API_KEY: whoever reaches {options['host']}:{settings.port} can use this server")
    if settings.int8_layers and not settings.int8_act:
        notes.append("INT8_LAYERS has no effect without INT8_ACT=1")
    if machine.wsl2 and machine.stack == "cuda":
        env["VLLM_WSL2_ENABLE_PIN_MEMORY"] = "1"
        notes.append("WSL2: pinned memory enabled")
    if settings.api_key:
        options["middleware"] = "qwen38_3090.api.RequireKey"
    notes += _patch_notes(environ, machine.stack)

    env = {key: value for key, value in env.items() if key not in environ}
    if environ.get("VLLM_API_KEY", "") != (settings.api_key or ""):
        env["VLLM_API_KEY"] = settings.api_key or ""
    if machine.stack == "cpu" and _or(settings.kv_mem, None):
        env["VLLM_CPU_KVCACHE_SPACE"] = _whole_gib(settings.kv_mem)
    if "VLLM_PLUGINS" in environ:
        listed = [plugin for plugin in environ["VLLM_PLUGINS"].split(",") if plugin]
        env["VLLM_PLUGINS"] = ",".join(dict.fromkeys([*listed, *PLUGINS]))
    return Launch(
        mode=name,
        context=ctx,
        argv=[*_command_line(options), *_extra(settings.extra_args), *vllm_arguments],
        env=env,
        patches=[patch.name for patch in patches.selected(environ, machine.stack)],
        notes=notes,
    )


def _refuse_what_comes_later(settings: Settings, mode: Mode) -> None:
    for name, sentence in mode.later.items():
        if getattr(settings, names()[name]) not in (None, False, OFF):
            raise SettingError(sentence)


def _extra(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise SettingError(f"EXTRA_ARGS={text}: {error}. Quote it as on a command line.") from None


def _or(value: Any, default: Any) -> Any:
    """A setting's value: the mode's when unset, None (leave it to vLLM) when off."""
    if value is None:
        return default
    return None if value == OFF else value


def _whole_gib(gib: float) -> str:
    if gib != int(gib):
        raise SettingError(f"KV_MEM={gib:g}: on the CPU it must be whole GiB; set KV_MEM={int(gib) + 1}.")
    return str(int(gib))


def _patch_notes(environ: Mapping[str, str], stack: str) -> list[str]:
    """What the user did with the patches' switches; a misspelt one would do nothing in silence."""
    known = [module.PATCH for module in patches.modules()]
    unknown = sorted({name for name in environ if name.startswith("PATCH_")} - {patch.switch for patch in known})
    here = {patch.name for patch in known if stack in patch.applies_to.platforms}
    off = sorted(here - {patch.name for patch in patches.selected(environ, stack)})
    notes = [f"{name} is no patch's switch and has no effect" for name in unknown]
    return notes + ([f"patches off, so vLLM's own faults are back: {', '.join(off)}"] if off else [])


def _memory(settings: Settings, mode: Mode, machine: Machine, notes: list[str]) -> dict[str, Any]:
    kv_gib = _or(settings.kv_mem, None)
    if machine.stack == "cpu":
        return {}
    default = mode.defaults.gpu_util
    if machine.wsl2 and settings.gpu_util is None and kv_gib is None:
        default = mode.defaults.wsl2_gpu_util
        notes.append(f"WSL2: GPU_UTIL is {default} instead of {mode.defaults.gpu_util}, for the Windows desktop")
    options = {"gpu-memory-utilization": _or(settings.gpu_util, default)}
    if kv_gib:
        options["kv-cache-memory-bytes"] = int(kv_gib * 2**30)
        if settings.gpu_util is not None:
            notes.append("GPU_UTIL has no effect on the KV cache while KV_MEM is set")
    return options


def _kv(settings: Settings, mode: Mode, default: str | None) -> dict[str, Any]:
    name = _or(settings.kv, default) or "bf16"
    kind = mode.kv.get(name)
    if kind is None:
        able = " | ".join(known for known, it in mode.kv.items() if not it.later)
        raise SettingError(f"KV={name}: it must be {able}.")
    if kind.later:
        raise SettingError(kind.later)
    return kind.arguments


def _prefix_cache(settings: Settings, mode: Mode) -> dict[str, Any]:
    on = mode.defaults.prefix_cache if settings.prefix_cache is None else settings.prefix_cache
    return {"enable-prefix-caching": on} | (mode.prefix_cache_arguments if on else {"mamba-cache-mode": "none"})


def _speculation(settings: Settings, mode: Mode, ctx: str, notes: list[str]) -> dict[str, Any]:
    spec = settings.spec or mode.defaults.spec
    for name, owner in (("DRAFT_TOKENS", "mtp"), ("DFLASH_TOKENS", "dflash2"), ("DRAFT", "dflash2")):
        value = getattr(settings, names()[name])
        if value not in (None, OFF) and spec != owner:
            notes.append(f"{name}={value} has no effect with SPEC={spec}")
    if spec == OFF:
        return {}
    kind = mode.speculation[spec]
    if kind.later:
        raise SettingError(kind.later)
    chosen = settings.draft_tokens if spec == "mtp" else settings.dflash_tokens
    count = chosen or mode.contexts[ctx].draft_tokens.get(spec) or kind.draft_tokens
    return {"speculative-config": {**kind.config, "num_speculative_tokens": count}}


def _command_line(options: Mapping[str, Any]) -> list[str]:
    words = []
    for name, value in options.items():
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list):
            words += [f"--{name}", *value]
        else:
            words += [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words
