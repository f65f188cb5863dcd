"""launch(): settings and mode in, vLLM's command, environment and patches out."""

import json

import pytest

from qwen38_3090 import modes, settings
from qwen38_3090.demo import MODEL_DIR
from qwen38_3090.launch import Machine, launch
from qwen38_3090.settings import SettingError, Settings

CUDA, CPU = Machine("cuda"), Machine("cpu")


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in settings.names():
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def resolve(monkeypatch):
    def run(machine=CUDA, environ=(), arguments=(), **values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        return launch(Settings.read(), machine, dict(environ), arguments)

    return run


def value(plan, option):
    """The last value of an option, None when absent."""
    found = [plan.argv[i + 1] for i, word in enumerate(plan.argv) if word == f"--{option}"]
    return found[-1] if found else None


def speculation(plan):
    text = value(plan, "speculative-config")
    return text and json.loads(text)


MTP4 = {
    "method": "mtp", "draft_sample_method": "probabilistic", "rejection_sample_method": "standard",
    "num_speculative_tokens": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("machine", "values", "expected"),
    [
        (CUDA, {}, {"max-model-len": "65536", "kv-cache-dtype": "auto", "attention-backend": "FLASH_ATTN", "drafts": 4,
                    "max-num-seqs": "8", "gpu-memory-utilization": "0.95", "mamba-ssm-cache-dtype": "float16"}),
        (CUDA, {"CTX": "long"}, {"max-model-len": "150000", "kv-cache-dtype": "fp8", "attention-backend": "FLASHINFER",
                                 "drafts": 3}),
        (CUDA, {"CTX": "long", "DRAFT_TOKENS": "5"}, {"drafts": 5}),
        (CUDA, {"CTX": "long", "KV": ""}, {"kv-cache-dtype": "auto", "attention-backend": "FLASH_ATTN"}),
        (CUDA, {"SPEC": "off"}, {"drafts": None}),
        (CUDA, {"SPEC": ""}, {"drafts": None}),
        (CUDA, {"MODE": "batch"}, {"max-model-len": "150000", "kv-cache-dtype": "fp8", "drafts": None,
                                   "max-num-seqs": "64", "gpu-memory-utilization": "0.972"}),
        (CUDA, {"MODE": "batch", "SPEC": "mtp"}, {"drafts": 4}),
        (CUDA, {"MAX_LEN": "1000", "MAX_SEQS": "3", "GPU_UTIL": "0.5"},
         {"max-model-len": "1000", "max-num-seqs": "3", "gpu-memory-utilization": "0.5"}),
        (CUDA, {"MAX_LEN": "", "MAX_SEQS": "", "GPU_UTIL": ""},
         {"max-model-len": None, "max-num-seqs": None, "gpu-memory-utilization": None}),
        (CUDA, {"KV_MEM": "5.2"}, {"kv-cache-memory-bytes": str(int(5.2 * 2**30))}),
        (CPU, {}, {"model": str(MODEL_DIR), "drafts": 3, "mamba-ssm-cache-dtype": "float32", "max-model-len": "8192",
                   "gpu-memory-utilization": None}),
        (CPU, {"CTX": "long"}, {"max-model-len": "32768"}),
        (CPU, {"MODEL": "/m"}, {"model": "/m"}),
        (CUDA, {"LISTEN": "::1", "PORT": "9"}, {"host": "::1", "port": "9"}),
        (CUDA, {}, {"host": "127.0.0.1", "port": "18020"}),
        (CUDA, {"VLLM_API_KEY": "k"}, {"host": "0.0.0.0"}),
        (CUDA, {"VLLM_API_KEY": ""}, {"host": "127.0.0.1"}),
    ],
)  # fmt: skip
def test_resolved(resolve, machine, values, expected):
    plan = resolve(machine, **values)
    for option, wanted in expected.items():
        drafts = (speculation(plan) or {}).get("num_speculative_tokens")
        assert (drafts if option == "drafts" else value(plan, option)) == wanted, option


def test_single_mode_in_full(resolve):
    plan = resolve()
    assert (plan.mode, plan.context) == ("single", "fast")
    assert speculation(plan) == MTP4
    at = plan.argv.index("--served-model-name")
    assert plan.argv[at + 1 : at + 3] == ["qwen3.8-27b", "qwen38"]
    for word in ("--enable-prefix-caching", "--language-model-only", "--enable-auto-tool-choice"):
        assert word in plan.argv
    options = ("mamba-cache-mode", "max-num-batched-tokens", "reasoning-parser", "tool-call-parser")
    assert [value(plan, option) for option in options] == ["align", "2048", "qwen3", "qwen3_coder"]
    assert plan.env["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert plan.notes == []


def test_switches_off(resolve):
    plan = resolve(PREFIX_CACHE="", TOOLS="0")
    assert "--no-enable-prefix-caching" in plan.argv and value(plan, "mamba-cache-mode") == "none"
    assert "--enable-auto-tool-choice" not in plan.argv


def test_the_environments_own_values_win(resolve):
    plan = resolve(environ={"PYTORCH_CUDA_ALLOC_CONF": "", "VLLM_USE_V2_MODEL_RUNNER": "1"})
    assert not {"PYTORCH_CUDA_ALLOC_CONF", "VLLM_USE_V2_MODEL_RUNNER"} & set(plan.env)


def test_options_after_ours_win(resolve):
    plan = resolve(EXTRA_ARGS="--max-num-seqs 2 --chat-template 'a b'", arguments=["--max-num-seqs", "1"])
    assert plan.argv[-6:] == ["--max-num-seqs", "2", "--chat-template", "a b", "--max-num-seqs", "1"]


@pytest.mark.parametrize(
    ("set_by_user", "wanted"),
    [("", "qwen38_3090,qwen38_3090_early"), ("mine", "mine,qwen38_3090,qwen38_3090_early"),
     ("qwen38_3090,mine", "qwen38_3090,mine,qwen38_3090_early")],
)  # fmt: skip
def test_a_users_plugin_list_keeps_our_plugins(resolve, set_by_user, wanted):
    assert resolve(environ={"VLLM_PLUGINS": set_by_user}).env["VLLM_PLUGINS"] == wanted
    assert "VLLM_PLUGINS" not in resolve().env


def test_patches_follow_platform_and_switches(resolve):
    gpu, cpu = resolve().patches, resolve(CPU).patches
    assert "uniform_decode_guard" in gpu and "cpu_mamba_align" not in gpu
    assert "cpu_mamba_align" in cpu
    assert "gdn_accept_bounds" not in resolve(environ={"PATCH_GDN_ACCEPT_BOUNDS": "0"}).patches


def test_wsl2_pins_memory_and_lowers_the_pool(resolve):
    plan = resolve(Machine("cuda", wsl2=True))
    assert plan.env["VLLM_WSL2_ENABLE_PIN_MEMORY"] == "1"
    assert float(value(plan, "gpu-memory-utilization")) < 0.95
    assert any("WSL2" in note and "GPU_UTIL" in note for note in plan.notes)
    assert value(resolve(Machine("cuda", wsl2=True), GPU_UTIL="0.93"), "gpu-memory-utilization") == "0.93"
    assert "VLLM_WSL2_ENABLE_PIN_MEMORY" not in resolve().env


def test_the_key_is_not_on_the_command_line(resolve):
    plan = resolve(VLLM_API_KEY="s3cret")
    assert "s3cret" not in " ".join(plan.argv) and plan.env["VLLM_API_KEY"] == "s3cret"


def test_listening_everywhere_without_a_key_is_said(resolve):
    assert any("no VLLM_API_KEY" in note for note in resolve(LISTEN="0.0.0.0").notes)


@pytest.mark.parametrize(
    ("values", "name"),
    [({"DFLASH_TOKENS": "7"}, "DFLASH_TOKENS"), ({"SPEC": "off", "DRAFT_TOKENS": "4"}, "DRAFT_TOKENS"),
     ({"DRAFT": "d"}, "DRAFT"), ({"INT8_LAYERS": "mlp"}, "INT8_LAYERS"),
     ({"KV_MEM": "4", "GPU_UTIL": "0.9"}, "GPU_UTIL")],
)  # fmt: skip
def test_a_setting_without_effect_is_said(resolve, values, name):
    assert any(note.startswith(name) and "no effect" in note for note in resolve(**values).notes)


@pytest.mark.parametrize(
    ("machine", "values", "sentence"),
    [
        (CUDA, {"CTX": "huge"}, "CTX=huge .* use CTX=long"),
        (CUDA, {"SPEC": "dflash2"}, "SPEC=dflash2 needs .* use SPEC=mtp"),
        (CUDA, {"KV": "int8_per_token_head"}, "KV=int8_per_token_head .* use KV=fp8"),
        (CUDA, {"KV": "int3"}, r"KV=int3: it must be bf16 \| fp8"),
        (CUDA, {"LOOKUP": "1"}, "LOOKUP=1 .*unset it"),
        (CUDA, {"INT8_ACT": "1"}, "INT8_ACT=1 .*unset it"),
        (CUDA, {"MODE": "demo"}, "MODE=demo needs vLLM's CPU build.*setup.sh cpu"),
        (CPU, {"MODE": "single"}, "MODE=single needs vLLM's CUDA build.*setup.sh cuda"),
        (CPU, {"CTX": "huge"}, "CTX=huge"),
        (CPU, {"SPEC": "dflash2"}, "GPU only"),
        (CPU, {"GPU_UTIL": "0.9"}, "GPU_UTIL .*KV_MEM"),
        (CPU, {"INT8_ACT": "1"}, "GPU only"),
        (CPU, {"DRAFT": "d"}, "GPU only"),
    ],
)
def test_what_does_not_work_yet_is_refused_with_a_sentence(resolve, machine, values, sentence):
    with pytest.raises(SettingError, match=sentence):
        resolve(machine, **values)


@pytest.mark.parametrize("name", ["LOOKUP", "INT8_ACT"])
def test_off_is_never_refused(resolve, name):
    assert resolve(**{name: "0"}).argv


@pytest.mark.parametrize("name", ["single", "batch", "demo"])
def test_modes_are_complete(name):
    mode = modes.load(name)
    assert set(mode.contexts) == {"fast", "long", "huge"} and set(mode.speculation) == {"mtp", "dflash2"}
    for context in mode.contexts.values():
        assert bool(context.later) != bool(context.max_len)
        assert context.later or context.kv in mode.kv
    assert mode.environment["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert set(mode.later) <= set(settings.names())


def test_kv_cache_size_on_the_cpu(resolve):
    assert resolve(CPU).env["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert resolve(CPU, KV_MEM="2").env["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert resolve(CPU, {"VLLM_CPU_KVCACHE_SPACE": "7"}, KV_MEM="2").env["VLLM_CPU_KVCACHE_SPACE"] == "2"
    with pytest.raises(SettingError, match=r"KV_MEM=2\.5: on the CPU it must be whole GiB; set KV_MEM=3"):
        resolve(CPU, KV_MEM="2.5")


@pytest.mark.parametrize(("raw", "key"), [("off", ""), ("   ", ""), (" abc ", "abc"), ("", "")])
def test_vllm_sees_the_key_that_the_setting_means(resolve, raw, key):
    plan = resolve(environ={"VLLM_API_KEY": raw}, VLLM_API_KEY=raw)
    assert plan.env.get("VLLM_API_KEY", raw) == key
    assert value(plan, "host") == ("0.0.0.0" if key else "127.0.0.1")
    assert value(plan, "middleware") == ("qwen38_3090.api.RequireKey" if key else None)


def test_extra_args_with_an_open_quote(resolve):
    with pytest.raises(SettingError, match="EXTRA_ARGS=--a 'b: No closing quotation"):
        resolve(EXTRA_ARGS="--a 'b")


@pytest.mark.parametrize("off", ["0", "", "off", "No", "false"])
def test_patches_that_are_off_are_said(resolve, off):
    plan = resolve(environ={"PATCH_GDN_ACCEPT_BOUNDS": off})
    assert any(note.startswith("patches off") and "gdn_accept_bounds" in note for note in plan.notes)
    assert "gdn_accept_bounds" not in plan.patches


def test_a_misspelt_switch_is_said(resolve):
    assert any("PATCH_GDN_ACEPT_BOUNDS" in note for note in resolve(environ={"PATCH_GDN_ACEPT_BOUNDS": "0"}).notes)
