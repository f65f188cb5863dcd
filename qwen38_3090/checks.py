"""What can be known to be wrong before minutes of loading: each check raises SettingError with the remedy."""

import errno
import json
import socket
from pathlib import Path
from typing import Any

from qwen38_3090.settings import SettingError

ARCHITECTURES = ("Qwen3_5ForConditionalGeneration",)

# vLLM overrides the speculation method when the path holds one of these words (SpeculativeConfig.__post_init__).
MISLEADING_WORDS = ("eagle-", "eagle3", "dflash", "dspark")


def check_model(model: str, method: str | None, download: str | None = None) -> None:
    """`model` is a directory with config, tokenizer and all weights of a model that `method` ("mtp" or None) can serve.

    download: where the mode's own model is published, for the message.
    """
    directory = Path(model)
    remedy = "Set MODEL to the model's directory"
    if download:
        remedy += f", or download it: hf download {download} --local-dir {directory}"
    if not directory.is_dir():
        raise SettingError(f"MODEL={model}: there is no such directory. {remedy}.")
    for name in ("config.json", "tokenizer.json"):
        if not (directory / name).is_file():
            raise SettingError(f"MODEL={model}: {name} is missing. {remedy}.")
    architectures = read_json(directory / "config.json").get("architectures")
    if not isinstance(architectures, list) or not any(name in ARCHITECTURES for name in architectures):
        raise SettingError(
            f"MODEL={model}: config.json names the architectures {architectures}; this project serves "
            f"{', '.join(ARCHITECTURES)} only. Set MODEL to a Qwen3.8 checkpoint."
        )
    files = weight_files(directory)
    if not files:
        raise SettingError(f"MODEL={model}: *.safetensors is missing: it holds no weights. {remedy}.")
    missing = [name for name in files if not (directory / name).is_file()]
    if missing:
        raise SettingError(f"MODEL={model}: {', '.join(missing)} is missing. {remedy}.")
    held = {tensor for name in files for tensor in header(directory / name)}
    if method == "mtp":
        check_path_words(model)
        if not any(tensor.startswith("mtp.") for tensor in held):
            raise SettingError(f"MODEL={model}: it holds no MTP module (tensors mtp.*). Set SPEC=off.")


def check_path_words(model: str) -> None:
    """vLLM 0.27.1 takes an MTP model for another speculator when its path says so."""
    for word in MISLEADING_WORDS:
        if word in model.lower():
            raise SettingError(
                f"MODEL={model}: vLLM takes a path with '{word}' in it for another kind of drafter and would not run "
                f"SPEC=mtp. Rename the directory or link to it: ln -s {model} models/qwen38, then MODEL=models/qwen38."
            )


def check_port(host: str, port: int) -> None:
    """The address can be bound now."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise SettingError(f"LISTEN={host}: {error.strerror}. Set LISTEN to an address of this machine.") from None
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise SettingError(
                    f"PORT={port}: another program listens there (`ss -ltnp 'sport = :{port}'` names it). Stop it or "
                    "set another PORT."
                ) from None
            raise SettingError(f"LISTEN={host}, PORT={port}: {error.strerror}. Set another LISTEN or PORT.") from None


def check_gpu(stack: str) -> None:
    """A CUDA build of vLLM finds a GPU. Creates no CUDA context."""
    if stack != "cuda":
        return
    import torch

    if torch.cuda.device_count() == 0:
        raise SettingError(
            "vLLM's CUDA build is installed, but no NVIDIA GPU is usable here: `nvidia-smi` must list one. To try the "
            "small model on the CPU: MODE=demo bash scripts/serve.sh."
        )


def weight_files(directory: Path) -> list[str]:
    """Names of the checkpoint's safetensors files: those of its index, else those that lie there."""
    places = read_index(directory)
    if places is not None:
        return sorted(set(places.values()))
    return sorted(path.name for path in directory.glob("*.safetensors"))


def tensor_names(directory: Path) -> set[str]:
    """Names of all tensors in the checkpoint, from its index or its files' headers."""
    places = read_index(directory)
    if places is not None:
        return set(places)
    return {tensor for name in weight_files(directory) for tensor in header(directory / name)}


def header(file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Tensor name -> (shape, dtype as safetensors writes it) of a file. Raises SettingError when it is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
            return {name: (tuple(it.get_shape()), it.get_dtype()) for name, it in slices.items()}
    except SafetensorError as error:
        raise SettingError(f"{file} is damaged ({error}). Download the model again.") from None


def read_index(directory: Path) -> dict[str, str] | None:
    """Tensor name -> file name from the checkpoint's index, None when it has none. Raises SettingError when damaged."""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return None
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise SettingError(f"{index} is damaged (no weight_map). Download the model again.")
    return places


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises SettingError when it isn't one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise SettingError(f"{path} is damaged ({error}). Download the model again.") from None
    if not isinstance(content, dict):
        raise SettingError(f"{path} is damaged (not a JSON object). Download the model again.")
    return content
