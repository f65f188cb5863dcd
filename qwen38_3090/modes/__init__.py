"""The modes single, batch and demo: one YAML file each, read into `Mode`.

A context, a speculation or a KV type that the code can't serve yet stands there with `later`, the sentence that the
launcher answers when it is asked for.
"""

from functools import lru_cache
from importlib.resources import files
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Context(_Part):
    """What CTX chooses: longest request in tokens, KV type, and how many tokens each speculation drafts a step."""

    max_len: int | None = None
    kv: str | None = None
    draft_tokens: dict[str, int] = {}
    later: str | None = None


class Speculation(_Part):
    """vLLM's speculative configuration without the number of tokens, and that number's default."""

    draft_tokens: int | None = None
    config: dict[str, Any] = {}
    later: str | None = None


class KVType(_Part):
    """vLLM's options for one type of KV cache."""

    arguments: dict[str, Any] = {}
    later: str | None = None


class Defaults(_Part):
    """Defaults of the settings that the mode decides. `wsl2_gpu_util` replaces `gpu_util` under WSL2, where the Windows
    desktop holds memory of the same card."""

    spec: Literal["off", "mtp", "dflash2"]
    ctx: Literal["fast", "long", "huge"] = "fast"
    max_seqs: int
    gpu_util: float | None = None
    wsl2_gpu_util: float | None = None
    prefix_cache: bool = True
    tools: bool = True


class Mode(_Part):
    """One way of serving. `later` maps a setting's name to the sentence that answers it until it works."""

    summary: str
    stack: Literal["cuda", "cpu"]
    model: str | None = Field(None, description="directory, relative to the working directory; None is the demo model")
    download: str | None = Field(None, description="where the weights are published")
    served_names: list[str]
    defaults: Defaults
    contexts: dict[Literal["fast", "long", "huge"], Context]
    speculation: dict[Literal["mtp", "dflash2"], Speculation]
    kv: dict[str, KVType]
    arguments: dict[str, Any]
    prefix_cache_arguments: dict[str, Any]
    environment: dict[str, str]
    later: dict[str, str] = {}


@lru_cache
def load(name: str) -> Mode:
    """The mode `name` ("single", "batch" or "demo")."""
    return Mode.model_validate(_read(name))


def _read(name: str) -> dict[str, Any]:
    """The content of `name`.yaml upon that of the file it extends."""
    content = yaml.safe_load(files(__name__).joinpath(f"{name}.yaml").read_text(encoding="utf-8"))
    base = content.pop("extends", None)
    return _merged(_read(base), content) if base else content


def _merged(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """`own` upon `base`, mappings merged at every depth."""
    result = dict(base)
    for key, value in own.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if both else value
    return result
