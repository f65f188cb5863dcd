"""The demo model as published checkpoints are: body in int4 (compressed-tensors), MTP module in bf16 and forgotten."""

import json
import shutil
from pathlib import Path

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import load_file, save_file

from qwen38_3090.demo import MODEL_DIR

GROUP = 128
UNQUANTIZED = ("in_proj_a", "in_proj_b")


def write_checkpoint(directory: Path) -> None:
    """Copy the demo model to `directory` with every matrix of its layers rounded to int4, group 128, symmetric."""
    shutil.copytree(MODEL_DIR, directory)
    tensors = {}
    for name, weight in load_file(MODEL_DIR / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if (".language_model.layers." in name and module.endswith("_proj")) or _is_input(module):
            tensors |= _packed(module, weight)
        else:
            tensors[name] = weight
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    scheme = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None}},
        "ignore": ["lm_head", "re:.*in_proj_[ab]$", "re:.*visual.*"],
    }
    (directory / "config.json").write_text(json.dumps(config))


def _is_input(module: str) -> bool:
    return ".linear_attn.in_proj_" in module and not module.endswith(UNQUANTIZED)


def _packed(module: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    rows, columns = weight.shape
    groups = weight.float().view(rows, columns // GROUP, GROUP)
    scale = (groups.abs().amax(-1, keepdim=True) / 7).clamp_min(1e-8)
    codes = (groups / scale).round().clamp(-8, 7).to(torch.int8).view(rows, columns)
    return {
        f"{module}.weight_packed": pack_to_int32(codes, 4),
        f"{module}.weight_scale": scale.squeeze(-1).to(torch.bfloat16),
        f"{module}.weight_shape": torch.tensor([rows, columns]),
    }
