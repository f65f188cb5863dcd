"""The tensors that a Qwen3.5 checkpoint must hold, from its config alone: names, shapes, dtypes."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from qwen38_3090.mtp_ignore import names_module

FLOATS = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class Tensor:
    """A tensor by its safetensors header: shape, and dtype as safetensors writes it ("BF16", "I32"), one of several."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS


@dataclass(frozen=True)
class Packing:
    """How compressed-tensors packs a matrix: integers of `bits` bits, one scale for `group` inputs (-1: for a row)."""

    bits: int
    group: int

    def tensors(self, module: str, outputs: int, inputs: int) -> dict[str, Tensor]:
        """What stands in a checkpoint instead of `module`.weight [outputs, inputs]."""
        groups = 1 if self.group == -1 else math.ceil(inputs / self.group)
        return {
            f"{module}.weight_packed": Tensor((outputs, math.ceil(inputs * self.bits / 32)), ("I32",)),
            f"{module}.weight_scale": Tensor((outputs, groups)),
            f"{module}.weight_shape": Tensor((2,), ("I64",)),
        }


class Packings:
    """A config's `quantization_config`: which modules are packed, and how. Empty for a checkpoint that isn't quantized.

    Raises ValueError for any format but pack-quantized, symmetric, per group or row.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._ignored: list[str] = config.get("ignore") or []
        self._groups: list[tuple[list[str], Packing]] = []
        for group in (config.get("config_groups") or {}).values():
            scheme = group["weights"]
            known = scheme.get("type", "int") == "int" and scheme.get("symmetric", True)
            known = known and scheme.get("actorder") != "group"
            if config.get("format") != "pack-quantized" or scheme["strategy"] not in ("group", "channel") or not known:
                raise ValueError(f"{config.get('quant_method')}, {config.get('format')}, {scheme}")
            size = scheme["group_size"] if scheme["strategy"] == "group" else -1
            self._groups.append((group["targets"], Packing(scheme["num_bits"], size)))
        if config and not self._groups:
            raise ValueError(f"{config.get('quant_method')} without config_groups")

    def __bool__(self) -> bool:
        return bool(self._groups)

    def of(self, module: str, linear: bool = True) -> Packing | None:
        """How `module` is packed, None if it is not. linear: a Linear, which a target may name by its class."""
        if any(names_module(target, module) for target in self._ignored):
            return None
        for targets, packing in self._groups:
            if any(names_module(target, module) for target in targets):
                return packing
        for targets, packing in self._groups:
            if linear and "Linear" in targets:
                return packing
        return None


def matrices(config: Any, mtp: bool) -> dict[str, tuple[int, int]]:
    """Every Linear of the text model, and of the MTP module if `mtp`: name -> (outputs, inputs)."""
    found = {}
    for layer, kind in _layers(config, mtp):
        found |= {f"{layer}.{name}": shape for name, shape in _layer_matrices(config, kind)}
    if mtp:
        found["mtp.fc"] = (config.hidden_size, 2 * config.hidden_size)
    return found


def vocabulary_matrices(config: Any) -> dict[str, tuple[int, int]]:
    """The embedding and, unless it is tied, the output head: name -> (vocabulary, hidden)."""
    shape = (config.vocab_size, config.hidden_size)
    head = {} if config.tie_word_embeddings else {"lm_head": shape}
    return {"model.language_model.embed_tokens": shape} | head


def others(config: Any, mtp: bool) -> dict[str, Tensor]:
    """Every tensor that is never packed: norms, convolutions, decays."""
    hidden = Tensor((config.hidden_size,))
    found = {"model.language_model.norm.weight": hidden}
    if mtp:
        found |= {f"mtp.{name}.weight": hidden for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    values = config.linear_num_value_heads
    channels = 2 * config.linear_num_key_heads * config.linear_key_head_dim + values * config.linear_value_head_dim
    for layer, kind in _layers(config, mtp):
        found |= {f"{layer}.{name}.weight": hidden for name in ("input_layernorm", "post_attention_layernorm")}
        if kind == "full_attention":
            found |= {f"{layer}.self_attn.{name}.weight": Tensor((config.head_dim,)) for name in ("q_norm", "k_norm")}
        else:
            found |= {f"{layer}.linear_attn.{name}": Tensor((values,)) for name in ("A_log", "dt_bias")}
            found[f"{layer}.linear_attn.norm.weight"] = Tensor((config.linear_value_head_dim,))
            found[f"{layer}.linear_attn.conv1d.weight"] = Tensor((channels, 1, config.linear_conv_kernel_dim))
    return found


def _layers(config: Any, mtp: bool) -> Iterator[tuple[str, str]]:
    """(name, kind) of each decoder layer, and of the MTP module's."""
    for index, kind in enumerate(config.layer_types):
        yield f"model.language_model.layers.{index}", kind
    for index in range(config.mtp_num_hidden_layers if mtp else 0):
        yield f"mtp.layers.{index}", "full_attention"


def _layer_matrices(config: Any, kind: str) -> Iterator[tuple[str, tuple[int, int]]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    yield from {
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }.items()
    if kind == "full_attention":
        queries = config.num_attention_heads * config.head_dim
        gated = getattr(config, "attn_output_gate", True)
        yield "self_attn.q_proj", (queries * (2 if gated else 1), hidden)
        yield "self_attn.k_proj", (config.num_key_value_heads * config.head_dim, hidden)
        yield "self_attn.v_proj", (config.num_key_value_heads * config.head_dim, hidden)
        yield "self_attn.o_proj", (hidden, queries)
    else:
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        yield "linear_attn.in_proj_qkv", (2 * keys + values, hidden)
        yield "linear_attn.in_proj_z", (values, hidden)
        yield "linear_attn.in_proj_a", (config.linear_num_value_heads, hidden)
        yield "linear_attn.in_proj_b", (config.linear_num_value_heads, hidden)
        yield "linear_attn.out_proj", (hidden, values)
