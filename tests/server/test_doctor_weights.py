"""The doctor's checks of a model's directory, each with a checkpoint that is broken in one way."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from qwen38_3090 import modes
from qwen38_3090.demo import MODEL_DIR
from qwen38_3090.doctor import tensors, weights
from qwen38_3090.doctor.finding import FAIL, PASS, WARN
from qwen38_3090.doctor.tensors import Packing, Tensor
from tests.server.doctor import by_check, command_line, statuses

TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I32": torch.int32, "I64": torch.int64}
IN_PROJ = r"re:.*linear_attn\.in_proj_[ab]$"


@pytest.fixture
def model(tmp_path):
    """The demo model's directory, to break."""
    directory = tmp_path / "model"
    shutil.copytree(MODEL_DIR, directory)
    return directory


@pytest.fixture(scope="module")
def demo_headers():
    return weights.read_headers(MODEL_DIR)["model.safetensors"]


def write(path, headers):
    """A safetensors file of zeros with these shapes and dtypes."""
    save_file({name: torch.zeros(it.shape, dtype=TORCH[it.dtypes[0]]) for name, it in headers.items()}, path)


def edit(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def examine(directory, mode="demo", **changes):
    return by_check(weights.check(command_line(model=str(directory), **changes), modes.load(mode)))


def test_the_demo_model_is_right():
    found = examine(MODEL_DIR)
    assert statuses(found) == {PASS}
    assert list(found) == ["files", "tensors", "tokenizer", "chat template"]
    assert "MTP among them" in found["tensors"].detail and "<think>" in found["chat template"].detail


def test_every_tensor_of_the_demos_text_model_is_expected(demo_headers):
    """Nothing is left out of the check: only the vision tower, which is not loaded, has other names."""
    config = SimpleNamespace(**json.loads((MODEL_DIR / "config.json").read_text())["text_config"])
    matrices = tensors.matrices(config, True) | tensors.vocabulary_matrices(config)
    wanted = tensors.others(config, True).keys() | {f"{name}.weight" for name in matrices}
    assert wanted == {name for name in demo_headers if not name.startswith("model.visual.")}


def test_sizes_of_the_27b_model():
    config = SimpleNamespace(
        hidden_size=5120, intermediate_size=17408, vocab_size=248320, num_attention_heads=24, num_key_value_heads=4,
        head_dim=256, linear_num_key_heads=16, linear_num_value_heads=48, linear_key_head_dim=128,
        linear_value_head_dim=128, linear_conv_kernel_dim=4, tie_word_embeddings=False, mtp_num_hidden_layers=1,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 16,
    )  # fmt: skip
    sizes = {name: rows * columns for name, (rows, columns) in tensors.matrices(config, True).items()}
    mtp = sum(size for name, size in sizes.items() if name.startswith("mtp."))
    assert (round(mtp / 1e6, 1), round((sum(sizes.values()) - mtp) / 1e9, 2)) == (424.7, 24.35)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file(model, name):
    (model / name).unlink()
    found = examine(model)
    assert statuses(found) == {FAIL} and list(found) == ["files"]
    assert "is missing" in found["files"].detail and found["files"].remedy.startswith("Set MODEL")


def test_the_download_is_named_for_the_modes_own_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = examine(modes.load("single").model, "single")
    assert "hf download dbirks/Qwen3.8-27B-W4A16-AutoRound" in found["files"].remedy


@pytest.mark.parametrize("keep", [0, 4, 5000, -1])
def test_a_truncated_weight_file(model, keep):
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content[:keep])
    found = examine(model)
    assert found["files"].status == FAIL and "model.safetensors is damaged" in found["files"].detail
    assert found["files"].remedy == "Download the model again."


def test_a_checkpoint_without_mtp(model, demo_headers):
    write(model / "model.safetensors", {k: v for k, v in demo_headers.items() if not k.startswith("mtp.")})
    assert examine(model)["files"].remedy == "Set SPEC=off."
    assert statuses(examine(model, speculative_config=None)) == {PASS}


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (None, "mlp.up_proj.weight is missing"),
        (Tensor((256, 64), ("BF16",)), "mlp.up_proj.weight is [256, 64] instead of [256, 128]"),
        (Tensor((256, 128), ("I32",)), "mlp.up_proj.weight is I32 instead of BF16 or F16 or F32"),
    ],
)
def test_a_wrong_tensor(model, demo_headers, changed, problem):
    headers = dict(demo_headers)
    name = "model.language_model.layers.2.mlp.up_proj.weight"
    del headers[name]
    write(model / "model.safetensors", headers | ({name: changed} if changed else {}))
    found = examine(model)
    assert found["tensors"].status == FAIL
    assert found["tensors"].detail.startswith("1 of 124") and problem in found["tensors"].detail


def test_a_config_of_another_size(model):
    edit(model / "config.json", lambda content: content["text_config"].update(num_hidden_layers=9, layer_types=None))
    found = examine(model)
    assert found["tensors"].status == FAIL and "layers.8.input_layernorm.weight is missing" in found["tensors"].detail


def test_a_config_that_cannot_be_used(model):
    edit(model / "config.json", lambda content: content["text_config"].update(layer_types=["other"]))
    found = examine(model)
    assert found["tensors"].status == FAIL and "config.json can't be used" in found["tensors"].detail


def shard(model, headers):
    """The model in two files with an index."""
    names = sorted(headers)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in files.items():
        write(model / file, {name: headers[name] for name in held})
    (model / "model.safetensors").unlink()
    places = {name: file for file, held in files.items() for name in held}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return places


def test_shards(model, demo_headers):
    shard(model, demo_headers)
    found = examine(model)
    assert statuses(found) == {PASS} and found["index"].detail == f"{len(demo_headers)} tensors, each in its file"


def test_an_index_that_disagrees_with_its_files(model, demo_headers):
    places = shard(model, demo_headers)
    index = model / "model.safetensors.index.json"
    edit(index, lambda content: content["weight_map"].update({"mtp.extra.weight": "a.safetensors"}))
    found = examine(model)
    assert found["index"].status == FAIL and "mtp.extra.weight in a.safetensors" in found["index"].detail
    index.write_text(json.dumps({"weight_map": {k: v for k, v in places.items() if k != "lm_head.weight"}}))
    found = examine(model)
    assert found["index"].status == WARN and "lm_head.weight in" in found["index"].detail


def quantized(headers, packings, ignored=()):
    """The demo's headers with every Linear packed but those that `ignored` says."""
    result = {}
    for name, tensor in headers.items():
        module = name.removesuffix(".weight")
        linear = len(tensor.shape) == 2 and (".layers." in name or name == "mtp.fc.weight")
        if linear and not any(word in name for word in ignored):
            packed = packings.tensors(module, *tensor.shape)
            result |= {key: Tensor(it.shape, it.dtypes[:1]) for key, it in packed.items()}
        else:
            result[name] = tensor
    return result


def quantization_config(*ignore):
    scheme = {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "dynamic": False,
        "actorder": None,
    }  # fmt: skip
    groups = {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": None}}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups,
        "ignore": ["lm_head", IN_PROJ, *ignore],
    }  # fmt: skip


@pytest.fixture
def w4a16(model, demo_headers):
    """The demo as published checkpoints are: the body packed, the MTP module not and properly listed."""
    write(model / "model.safetensors", quantized(demo_headers, Packing(4, 128), ("in_proj_a.", "in_proj_b.", "mtp.")))
    edit(model / "config.json", lambda content: content.update(quantization_config=quantization_config(r"re:^mtp\.")))
    return model


def test_w4a16(w4a16):
    found = examine(w4a16, "single")
    assert found["tensors"].status == PASS and found["quantization"].status == PASS
    assert "50 matrices packed" in found["quantization"].detail
    assert found["int8"].status == WARN
    assert found["int8"].detail.startswith("embed_tokens, lm_head, MTP in bf16 take 0.00 GiB")
    assert "int8" not in examine(w4a16, "demo")


def test_what_int8_would_save():
    """Two matrices of 2^20 x 2^10: 4 GiB in bf16; in int8 2 GiB, and a 16-bit scale for each 128."""
    held = {f"{name}.weight": Tensor((2**20, 2**10)) for name in ("lm_head", "x.embed_tokens")}
    *_, found = weights._size(held, ["some"], ["lm_head", "x.embed_tokens", "mtp.fc"])
    assert found.detail == "lm_head, embed_tokens in bf16 take 4.00 GiB; in int8 they would take 1.97 GiB less"
    *_, found = weights._size({}, ["some"], ["lm_head"])
    assert found.status == PASS


def test_mtp_that_the_config_forgets(w4a16):
    """As in the published checkpoint: bf16, but `ignore` does not say so."""
    edit(w4a16 / "config.json", lambda content: content.update(quantization_config=quantization_config()))
    found = examine(w4a16, "single")
    assert found["MTP"].status == PASS and found["MTP"].detail.startswith("serve lists 8 MTP matrices")
    assert FAIL not in statuses(found)
    assert "MTP" not in examine(w4a16, "single", speculative_config=None)


def test_another_module_that_the_config_forgets(w4a16):
    def change(content):
        content["quantization_config"]["ignore"].remove(IN_PROJ)

    edit(w4a16 / "config.json", change)
    found = examine(w4a16, "single")
    assert found["quantization_config"].status == FAIL
    assert "linear_attn.in_proj_a" in found["quantization_config"].remedy


def test_a_group_size_that_the_tensors_do_not_have(w4a16):
    def change(content):
        content["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 64

    edit(w4a16 / "config.json", change)
    found = examine(w4a16, "single")
    assert found["tensors"].status == FAIL and "weight_scale is" in found["tensors"].detail


def test_a_packed_module_without_scales(w4a16):
    headers = dict(weights.read_headers(w4a16)["model.safetensors"])
    del headers["model.language_model.layers.0.linear_attn.out_proj.weight_scale"]
    write(w4a16 / "model.safetensors", headers)
    assert "out_proj.weight_scale is missing" in examine(w4a16, "single")["tensors"].detail


def test_an_int8_head_is_matched_by_name(w4a16):
    headers = dict(weights.read_headers(w4a16)["model.safetensors"])
    packed = Packing(8, 128).tensors("lm_head", *headers.pop("lm_head.weight").shape)
    write(w4a16 / "model.safetensors", headers | {key: Tensor(it.shape, it.dtypes[:1]) for key, it in packed.items()})

    def change(content):
        config = content["quantization_config"]
        scheme = config["config_groups"]["group_0"]["weights"] | {"num_bits": 8}
        config["config_groups"]["group_1"] = {"targets": ["re:.*lm_head$"], "weights": scheme}
        config["ignore"].remove("lm_head")

    edit(w4a16 / "config.json", change)
    found = examine(w4a16, "single")
    assert found["tensors"].status == PASS and "lm_head" not in found["int8"].detail


def test_a_body_in_bf16_is_too_large_for_the_card(model):
    found = examine(model, "single")
    assert found["quantization"].status == WARN and found["quantization"].remedy == "Use a W4A16 checkpoint."


def test_another_kind_of_quantization(model):
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    edit(model / "config.json", lambda content: content.update(quantization_config=config))
    found = examine(model)
    assert found["tensors"].status == WARN and "fp8" in found["tensors"].detail


def test_targets_are_vllms_names_or_the_files():
    packings = tensors.Packings(quantization_config(r"re:^language_model\.model\.layers\.3\.", "mtp.fc"))
    assert packings.of("model.language_model.layers.3.mlp.up_proj") is None
    assert packings.of("model.language_model.layers.4.mlp.up_proj") == Packing(4, 128)
    assert packings.of("model.language_model.layers.4.linear_attn.in_proj_a") is None
    assert packings.of("mtp.fc") is None and packings.of("mtp.layers.0.mlp.up_proj") == Packing(4, 128)
    assert packings.of("model.language_model.embed_tokens", linear=False) is None


def test_a_tokenizer_that_splits_think(model):
    def forget(content):
        content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] != "<think>"]

    edit(model / "tokenizer.json", forget)
    found = examine(model)
    assert found["tokenizer"].status == FAIL
    assert "<think> (4)" in found["tokenizer"].detail and "</think>" not in found["tokenizer"].detail


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"added_tokens": [], "model": {"vocab": [1, 2]}}'])
def test_a_damaged_tokenizer(model, content):
    (model / "tokenizer.json").write_text(content)
    found = examine(model)
    assert found["tokenizer"].status == FAIL and found["tokenizer"].remedy == "Download the model again."
    assert "chat template" not in found


def test_chat_templates(model):
    template = model / "chat_template.jinja"
    template.write_text("{% if %}")
    found = examine(model)
    assert found["chat template"].status == FAIL and "plain question" in found["chat template"].detail
    template.unlink()
    assert examine(model)["chat template"].status == FAIL
    assert examine(model, chat_template="other.jinja")["chat template"].status == PASS
