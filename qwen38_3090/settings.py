"""Every setting, once: environment name, type, default and meaning. `--help` and docs/settings.md are made from this.

A variable that is unset takes its default (often the mode's); one that is set to the empty string means "off".
Settings come from the environment; `serve` and `doctor` first add what a file `.env` in the working directory holds.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

OFF = "off"
Off = Literal["off"]


class SettingError(ValueError):
    """A setting has a value that can't work; the message names the setting and the remedy."""


def _empty_is_off(value: Any) -> Any:
    if isinstance(value, str):
        value = value.strip()
    return OFF if value in ("", "off", "OFF") else value


def _empty_is_false(value: Any) -> Any:
    return False if isinstance(value, str) and not value.strip() else value


def _not_empty(value: Any) -> Any:
    if isinstance(value, str) and not value.strip():
        raise ValueError("it cannot be off; unset it for the default")
    return value


def _key(value: str) -> str:
    value = value.strip()
    return "" if value.lower() == OFF else value


Switch = Annotated[bool | None, BeforeValidator(_empty_is_false)]
Required = BeforeValidator(_not_empty)
CanBeOff = BeforeValidator(_empty_is_off)


def _setting(name: str, meaning: str, default: Any = None, shown: str | None = None) -> Any:
    """One setting. shown: how the docs name the default when it is not a fixed value."""
    return Field(default, validation_alias=name, description=meaning, json_schema_extra={"shown": shown})


class Settings(BaseSettings):
    """What a user may set. None stands for "the mode's default", "off" for an empty value."""

    model_config = SettingsConfigDict(case_sensitive=True, extra="ignore", validate_default=False)

    mode: Annotated[Literal["single", "batch", "demo"] | None, Required] = _setting(
        "MODE",
        "What to serve: single (one to eight conversations, fastest answers), batch (many requests, most tokens a "
        "second) or demo (a small model of the same architecture, on the CPU).",
        shown="single with vLLM's CUDA build, demo with its CPU build",
    )
    model: Annotated[str | None, Required] = _setting(
        "MODEL",
        "Directory of the model's weights, config and tokenizer.",
        shown="the mode's: below models/, or the demo model",
    )
    spec: Annotated[Literal["off", "mtp", "dflash2"] | None, CanBeOff] = _setting(
        "SPEC", "Speculation: off, mtp (the model's own draft module) or dflash2 (a block drafter).", shown="mode"
    )
    ctx: Annotated[Literal["fast", "long", "huge"] | None, Required] = _setting(
        "CTX",
        "Context: fast (64k), long (150k) or huge (262k; demo: 8k, 32k); sets length, KV type and drafts.",
        shown="fast; batch: long",
    )
    draft: Annotated[str | None, CanBeOff] = _setting(
        "DRAFT", "Directory of the DFlash2 drafter (SPEC=dflash2).", shown="none"
    )
    draft_tokens: Annotated[Annotated[int, Field(ge=1, le=20)] | None, Required] = _setting(
        "DRAFT_TOKENS", "Tokens that MTP drafts a step, 1 to 20; SPEC=off drafts none.", shown="mode and context"
    )
    dflash_tokens: Annotated[Annotated[int, Field(ge=1, le=20)] | None, Required] = _setting(
        "DFLASH_TOKENS", "Tokens that DFlash2 drafts a step, 1 to 20; SPEC=off drafts none.", shown="mode and context"
    )
    lookup: Switch = _setting("LOOKUP", "Also draft from the request's own context.", shown="off until it is available")
    prefix_cache: Switch = _setting("PREFIX_CACHE", "Keep and reuse the state of shared prompt prefixes.", shown="1")
    kv: Annotated[str | None, CanBeOff] = _setting(
        "KV", "Type of the KV cache, one of the mode's; off is bf16.", shown="mode and context"
    )
    int8_act: Switch = _setting(
        "INT8_ACT", "Round the activations of chosen int4 layers to int8: faster batches, not lossless.", shown="0"
    )
    int8_layers: Annotated[str | None, CanBeOff] = _setting(
        "INT8_LAYERS", "Regular expression for the layers that INT8_ACT changes.", shown="the MLP's"
    )
    max_len: Annotated[Annotated[int, Field(ge=16)] | Off | None, CanBeOff] = _setting(
        "MAX_LEN", "Longest request in tokens, prompt and answer; off leaves it to the model.", shown="context"
    )
    max_seqs: Annotated[Annotated[int, Field(ge=1)] | Off | None, CanBeOff] = _setting(
        "MAX_SEQS", "Requests that run at once; off leaves it to vLLM.", shown="mode"
    )
    gpu_util: Annotated[Annotated[float, Field(gt=0, le=1)] | Off | None, CanBeOff] = _setting(
        "GPU_UTIL", "Share of the card's memory to use, 0 to 1; off leaves it to vLLM.", shown="mode"
    )
    kv_mem: Annotated[Annotated[float, Field(gt=0, allow_inf_nan=False)] | Off | None, CanBeOff] = _setting(
        "KV_MEM", "GiB of KV cache a card, instead of what GPU_UTIL leaves; on the CPU whole GiB.", shown="off; demo: 1"
    )
    listen: Annotated[str | None, Required] = _setting(
        "LISTEN", "Address to listen on.", shown="127.0.0.1 without an API key, 0.0.0.0 with one"
    )
    port: Annotated[Annotated[int, Field(ge=1, le=65535)], Required] = _setting("PORT", "Port to listen on.", 18020)
    api_key: Annotated[str | None, AfterValidator(_key)] = _setting(
        "VLLM_API_KEY", "Key that clients must send; off accepts every request.", shown="off"
    )
    tools: Switch = _setting("TOOLS", "Parse tool calls from the answers.", shown="1")
    extra_args: str = _setting("EXTRA_ARGS", "More vLLM options, as on a command line; they win over ours.", "")

    @classmethod
    def read(cls) -> "Settings":
        """Settings from the environment. Raises SettingError, one line a wrong setting."""
        try:
            return cls()
        except ValidationError as error:
            problems = {problem["loc"][0]: problem for problem in reversed(error.errors())}
            raise SettingError("\n".join(map(_complaint, reversed(problems.values())))) from None


def names() -> dict[str, str]:
    """Environment name -> attribute of Settings, in order of declaration."""
    return {field.validation_alias: attribute for attribute, field in Settings.model_fields.items()}


def table() -> list[tuple[str, str, str, str]]:
    """(name, values, default, meaning) of every setting."""
    rows = []
    for name, attribute in names().items():
        field = Settings.model_fields[attribute]
        shown = field.json_schema_extra["shown"] or str(field.default) or "none"
        rows.append((name, _values(field.annotation), shown, field.description))
    return rows


def _values(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " | ".join(get_args(annotation))
    if get_origin(annotation) is Annotated:
        return _values(get_args(annotation)[0])
    parts = [part for part in get_args(annotation) if part is not type(None)]
    if parts:
        return " | ".join(_values(part) for part in parts)
    return {bool: "0 | 1", int: "whole number", float: "number", str: "text"}[annotation]


def _complaint(problem: Mapping[str, Any]) -> str:
    name = str(problem["loc"][0])
    field = Settings.model_fields[names()[name]]
    value = problem["input"]
    reason = problem["msg"].removeprefix("Value error, ")
    if problem["type"] in ("literal_error", "bool_parsing"):
        reason = f"it must be {_values(field.annotation)}"
    return f"{name}={value!s}: {reason}. {name}: {field.description}"
