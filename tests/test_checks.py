"""Checks before loading: each broken model directory or address gets its own sentence."""

import json
import shutil
import socket
import struct

import pytest

from qwen38_3090 import checks
from qwen38_3090.settings import SettingError


def write_tensors(path, names):
    """A safetensors file whose tensors have one byte each."""
    header = {name: {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i, name in enumerate(names)}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(len(names)))


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "qwen"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"architectures": ["Qwen3_5ForConditionalGeneration"]}))
    (directory / "tokenizer.json").write_text("{}")
    write_tensors(directory / "model.safetensors", ["lm_head.weight", "mtp.fc.weight"])
    return directory


def test_a_complete_model_passes(model):
    checks.check_model(str(model), "mtp")
    checks.check_model(str(model), None)


def test_a_sharded_model_passes_and_misses_a_shard(model):
    (model / "model.safetensors").rename(model / "a.safetensors")
    index = {"weight_map": {"lm_head.weight": "a.safetensors", "mtp.fc.weight": "b.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SettingError, match=r"b\.safetensors is missing"):
        checks.check_model(str(model), "mtp")
    write_tensors(model / "b.safetensors", ["mtp.fc.weight"])
    checks.check_model(str(model), "mtp")


@pytest.mark.parametrize("content", ['{"metadata": {}}', '{"weight_map": []}', '{"weight_map": {"a": 1}}', "{"])
def test_a_damaged_index(model, content):
    (model / "model.safetensors.index.json").write_text(content)
    with pytest.raises(SettingError, match=r"index\.json is damaged.*Download"):
        checks.check_model(str(model), "mtp")


def test_no_directory(tmp_path):
    with pytest.raises(SettingError, match=r"no such directory\. Set MODEL .* hf download org/name --local-dir"):
        checks.check_model(str(tmp_path / "absent"), None, "org/name")


def test_no_weights(model):
    (model / "model.safetensors").unlink()
    with pytest.raises(SettingError, match="holds no weights"):
        checks.check_model(str(model), None)


@pytest.mark.parametrize("names", [None, "Qwen3_5ForConditionalGeneration", [3], {}])
def test_architectures_of_another_type(model, names):
    (model / "config.json").write_text(json.dumps({"architectures": names}))
    with pytest.raises(SettingError, match="names the architectures"):
        checks.check_model(str(model), None)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(model, name):
    (model / name).unlink()
    with pytest.raises(SettingError, match=rf"MODEL=.*{name.replace('model.', '.*')}.* is missing"):
        checks.check_model(str(model), None)


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00"])
def test_a_damaged_config(model, content):
    (model / "config.json").write_text(content)
    with pytest.raises(SettingError, match=r"config\.json is damaged"):
        checks.check_model(str(model), None)


def test_another_architecture(model):
    (model / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(SettingError, match=r"names the architectures .*LlamaForCausalLM"):
        checks.check_model(str(model), None)


@pytest.mark.parametrize("word", ["DFlash2", "eagle3", "Eagle-x", "dspark"])
def test_a_path_that_vllm_takes_for_a_drafter(model, word):
    other = model.parent / f"qwen-{word}"
    shutil.copytree(model, other)
    with pytest.raises(SettingError, match=r"another kind of drafter.*ln -s"):
        checks.check_model(str(other), "mtp")
    checks.check_model(str(other), None)


def test_no_mtp_module(model):
    write_tensors(model / "model.safetensors", ["lm_head.weight"])
    with pytest.raises(SettingError, match=r"no MTP module.*SPEC=off"):
        checks.check_model(str(model), "mtp")
    checks.check_model(str(model), None)


def test_a_damaged_weight_file(model):
    (model / "model.safetensors").write_bytes(b"\x00" * 4)
    for method in ("mtp", None):
        with pytest.raises(SettingError, match=r"model\.safetensors is damaged.*Download"):
            checks.check_model(str(model), method)


def test_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingError, match=f"PORT={port}: another program listens there"):
            checks.check_port("127.0.0.1", port)
    checks.check_port("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.1"])
def test_an_address_that_is_not_ours(host):
    with pytest.raises(SettingError, match=f"LISTEN={host}"):
        checks.check_port(host, 18020)


def test_no_gpu(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SettingError, match="no NVIDIA GPU"):
        checks.check_gpu("cuda")
    checks.check_gpu("cpu")
