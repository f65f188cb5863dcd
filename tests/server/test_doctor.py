"""The doctor: environment, patches, the report and its exit status, verify.sh."""

import dataclasses
import functools
import importlib
import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import jsonschema
import pytest
import torch
from qwen38_3090.patches import patch as framework
from qwen38_3090.patches.patch import AppliesTo, Patch, Rebinding, Target

from qwen38_3090 import patches
from qwen38_3090.doctor import __main__ as doctor
from qwen38_3090.doctor import environment, patching
from qwen38_3090.doctor.finding import FAIL, PASS, SKIP, WARN, Finding, split_remedy
from tests.server.conftest import clean_environment
from tests.server.doctor import by_check, statuses

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
SCHEMA = {
    "type": "array",
    "minItems": 10,
    "items": {
        "type": "object",
        "required": ["group", "check", "status", "detail", "remedy"],
        "additionalProperties": False,
        "properties": {
            "group": {"enum": ["environment", "patches", "weights", "live server"]},
            "check": {"type": "string", "minLength": 1},
            "status": {"enum": ["PASS", "WARN", "FAIL", "SKIP"]},
            "detail": {"type": "string", "minLength": 1},
            "remedy": {"type": "string"},
        },
    },
}


# --- findings


@pytest.mark.parametrize("status", [WARN, FAIL])
def test_a_problem_needs_a_remedy(status):
    with pytest.raises(ValueError, match="without a remedy"):
        Finding("weights", "files", status, "missing")


def test_text():
    finding = Finding("weights", "files", FAIL, "missing", "Download.")
    assert finding.text() == "FAIL  weights      files: missing\n                   -> Download."
    assert finding.text(colour=True).startswith("\033[31mFAIL\033[0m  weights")


def test_an_error_is_split_into_what_and_what_to_do():
    assert split_remedy("X=1.5: no. Set X=2. Or 3.") == ("X=1.5: no", "Set X=2. Or 3.")
    assert split_remedy("X: no")[1]


# --- environment


def look(install=False, **environ):
    return by_check(environment.check(install, environ))


@pytest.fixture
def cuda(monkeypatch):
    """vLLM's CUDA build, as far as the doctor can tell."""
    monkeypatch.setattr(environment, "installed_platform", lambda: "cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def test_this_environment_is_right():
    found = look()
    assert statuses(found) <= {PASS, WARN} and found["vLLM"].detail.startswith("0.27.1")
    assert [check for check, finding in found.items() if finding.status == WARN] in ([], ["disk"], ["GPU"])


def test_another_vllm(monkeypatch):
    monkeypatch.setattr(framework, "version", lambda name: "0.28.0")
    found = look()["vLLM"]
    assert found.status == FAIL and "installed is 0.28.0" in found.detail and "scripts/setup.sh" in found.remedy


def versions(monkeypatch, **changes):
    """Let these packages have other versions; None stands for not installed."""
    real = metadata.version

    def version(name):
        if name not in changes:
            return real(name)
        if changes[name] is None:
            raise metadata.PackageNotFoundError(name)
        return changes[name]

    monkeypatch.setattr(metadata, "version", version)


def test_other_versions_than_the_pinned_ones(monkeypatch):
    monkeypatch.setattr(environment, "_pinned", {"torch": "2.13.0", "triton": "3.7.1"}.get)
    versions(monkeypatch, torch="2.12.1+cpu", triton="3.9.0")
    found = look()
    assert found["torch"].status == FAIL and found["torch"].detail == "2.12.1+cpu is installed, 2.13.0 is needed"
    assert found["Triton"].status == WARN and found["Triton"].detail == "3.9.0 is installed, 3.7.1 is needed"


def test_packages_that_are_not_installed(monkeypatch):
    versions(monkeypatch, torch=None, triton=None, vllm=None)
    found = look()
    assert found["torch"].status == FAIL and found["torch"].detail.startswith("not installed")
    assert found["Triton"].detail.startswith("not installed")
    assert found["vLLM's metadata"].status == FAIL


def test_the_pin_comes_from_what_is_installed():
    assert environment._pinned("torch") == "2.13.0" and environment._pinned("no-such-package") is None


def test_python(monkeypatch):
    monkeypatch.setattr(environment.sys, "version_info", (3, 14, 0))
    found = environment._python()
    assert found.status == FAIL and "3.10 to 3.13" in found.detail


def test_a_torch_of_another_build(monkeypatch):
    monkeypatch.setattr(environment, "installed_platform", lambda: "cuda")
    monkeypatch.setattr(torch.version, "cuda", None)
    found = look(install=True)["torch"]
    assert found.status == FAIL and "beside the CUDA build of vLLM" in found.detail


def test_no_gpu(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    found = look()["GPU"]
    assert found.status == FAIL and "no NVIDIA GPU" in found.detail and "MODE=demo" in found.remedy
    assert look(install=True)["GPU"].status == SKIP


@pytest.mark.parametrize(
    ("capability", "gib", "status", "reason"),
    [
        ((8, 6), 23.6, PASS, "23.6 GiB, compute capability 8.6"),
        ((8, 9), 22.0, PASS, ""),
        ((7, 5), 23.6, WARN, "need 8.0"),
        ((8, 6), 11.8, WARN, "made for 24 GB"),
        ((9, 0), 140.0, WARN, "made for 24 GB"),
    ],
)
def test_cards(cuda, monkeypatch, capability, gib, status, reason):
    card = SimpleNamespace(name="Card", major=capability[0], minor=capability[1], total_memory=int(gib * GIB))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    found = look()["GPU"]
    assert found.status == status and reason in found.detail


@pytest.mark.parametrize(
    ("chosen", "dropped"),
    [
        ("", "qwen38_3090,qwen38_3090_early"),
        ("lora_resolver", "qwen38_3090,qwen38_3090_early"),
        ("lora_resolver,qwen38_3090", "qwen38_3090_early"),
        ("qwen38_3090_early,qwen38_3090", None),
        (None, None),
    ],
)
def test_plugins_that_a_variable_drops(chosen, dropped):
    found = look(**({} if chosen is None else {"VLLM_PLUGINS": chosen}))["plugins"]
    if dropped is None:
        assert found.status == PASS
    else:
        assert found.status == WARN and found.remedy == f"Unset VLLM_PLUGINS, or add {dropped} to it."


def test_plugins_that_are_not_installed(monkeypatch):
    real = metadata.entry_points
    monkeypatch.setattr(metadata, "entry_points", lambda name, group: real(name=f"not_{name}", group=group))
    found = look()["plugins"]
    assert found.status == FAIL and "qwen38_3090, qwen38_3090_early are not installed" in found.detail


def test_compilers(cuda, monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    found = look(install=True)
    assert (found["C compiler"].status, found["nvcc"].status) == (FAIL, WARN)
    monkeypatch.setattr(shutil, "which", lambda name: name if "/" in name or name == "my-cc" else None)
    found = look(install=True, CC="my-cc", CUDA_HOME="/opt/cuda")
    assert found["C compiler"].detail.startswith("my-cc") and found["nvcc"].detail == "/opt/cuda/bin/nvcc"
    monkeypatch.setattr(environment.sysconfig, "get_path", lambda name: str(tmp_path))
    found = look(install=True, CC="my-cc")["C compiler"]
    assert found.status == FAIL and "python3-dev" in found.remedy


def test_the_cpu_build_needs_no_compilers():
    assert not {"C compiler", "nvcc"} & look().keys() or torch.version.cuda


def test_a_full_disk(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3 * GIB))
    assert look()["disk"].status == WARN


def test_a_home_that_does_not_exist(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "no" / "home"))
    assert "free at" in look()["disk"].detail


# --- patches


@pytest.fixture
def stock():
    """Whatever a test applies is reverted."""
    patches.revert_all()
    yield
    patches.revert_all()
    patches._refused.clear()


def test_every_patch_of_this_platform_is_bound(stock):
    found = by_check(patching.check())
    assert list(found) == list(patches.REGISTRY) and statuses(found) <= {PASS, SKIP}
    wanted = [patch.name for patch in patches.selected()]
    assert [name for name, finding in found.items() if finding.status == PASS] == wanted
    assert all("only" in finding.detail for finding in found.values() if finding.status == SKIP)


def test_a_patch_that_is_switched_off(stock, monkeypatch):
    monkeypatch.setenv("PATCH_GDN_ACCEPT_BOUNDS", "0")
    found = by_check(patching.check())["gdn_accept_bounds"]
    why = importlib.import_module("qwen38_3090.patches.gdn_accept_bounds").PATCH.why
    assert found.status == WARN and why in found.detail and "Unset PATCH_GDN_ACCEPT_BOUNDS" in found.remedy


def test_a_target_that_differs(stock, monkeypatch):
    module = importlib.import_module("qwen38_3090.patches.gdn_accept_bounds")
    wrong = dataclasses.replace(module.PATCH.targets[0], fingerprint="0" * 16)
    monkeypatch.setattr(module, "PATCH", dataclasses.replace(module.PATCH, targets=(wrong,)))
    found = by_check(patching.check())
    assert found["gdn_accept_bounds"].status == FAIL
    assert f"patch gdn_accept_bounds refuses: {wrong.path}" in found["gdn_accept_bounds"].detail
    assert "PATCH_GDN_ACCEPT_BOUNDS=0" in found["gdn_accept_bounds"].remedy
    assert {finding.status for name, finding in found.items() if name != "gdn_accept_bounds"} == {SKIP}
    assert "applied" not in {state.state for state in patches.report()}


@pytest.fixture
def only(stock, monkeypatch, tmp_path):
    """`only(source, wrap)`: a registry of one patch, whose target is a module with this source."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def register(source, apply):
        name = f"doctor_target_{tmp_path.name}"
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        framework._tree.cache_clear()
        module = ModuleType("qwen38_3090.patches.example")
        module.PATCH = Patch(
            name="example", why="-", targets=(Target(f"{name}:f", framework.fingerprint(f"{name}:f")),), upstream="-",
            retires_when="-", switch="PATCH_EXAMPLE", applies_to=AppliesTo(),
        )  # fmt: skip
        module.rebinding = Rebinding()
        module.apply = lambda: apply(module.rebinding, name)
        module.revert = module.rebinding.undo
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(patches, "REGISTRY", ("example",))
        return name

    yield register
    sys.modules.pop(f"doctor_target_{tmp_path.name}", None)


def wrap(rebinding, name):
    def make(original):
        @functools.wraps(original)
        def ours(*args):
            return original(*args)

        return ours

    rebinding.wrap(f"{name}:f", make)


def test_a_patch_that_binds_on_import(only):
    name = only("def f(): return 1\n", wrap)
    found = by_check(patching.check())["example"]
    assert found.status == PASS and "names replaced: 1" in found.detail and name in sys.modules


def test_a_patch_without_effect(only):
    only("def f(): return 1\n", lambda rebinding, name: None)
    found = by_check(patching.check())["example"]
    assert found.status == FAIL and "replaced nothing" in found.detail


def test_a_name_that_something_else_replaced_again(only):
    name = only("def f(): return 1\n", wrap)
    list(patching.check())
    sys.modules[name].f = lambda: 2
    found = by_check(patching.check())["example"]
    assert found.status == FAIL and f"{name}.f was replaced again" in found.detail


def test_a_patch_upon_a_patch(only):
    name = only("def f(): return 1\n", wrap)
    list(patching.check())
    upper = Rebinding()
    wrap(upper, name)
    assert by_check(patching.check())["example"].status == PASS
    upper.undo()


def test_a_patch_upon_a_patched_staticmethod(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "doctor_static.py").write_text("class A:\n    @staticmethod\n    def f(): return 1\n")

    def make(original):
        return staticmethod(functools.wraps(original.__func__)(lambda: original.__func__() + 1))

    lower, upper = Rebinding(), Rebinding()
    for rebinding in (lower, upper):
        rebinding.wrap("doctor_static:A.f", make)
    a = importlib.import_module("doctor_static").A
    assert a.f() == 3 and lower.lost == [] and upper.lost == []
    a.f = staticmethod(lambda: 0)
    assert lower.lost == upper.lost == ["A.f"]
    del sys.modules["doctor_static"]


@pytest.mark.parametrize(
    "error", ["ImportError('no such library')", "OSError('libcuda.so.1')", "RuntimeError('no GPU')"]
)
def test_a_module_that_cannot_be_imported(only, error):
    name = only(f"def f(): return 1\nraise {error}\n", wrap)
    found = by_check(patching.check())["example"]
    assert found.status == FAIL and f"can't be imported: {name} ({error.partition('(')[0]}: " in found.detail
    found = by_check(patching.check(importable=False))["example"]
    assert found.status == SKIP and f"not importable without a GPU: {name}" in found.detail


# --- the command


def run(directory, *arguments, **settings):
    environ = clean_environment(**{"MODE": "demo", "PORT": "1"} | settings)
    return subprocess.run(
        [sys.executable, "-m", "qwen38_3090.doctor", *arguments],
        env=environ, cwd=directory, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_json_of_a_right_installation(tmp_path):
    """Without a server: everything is examined, the live group is skipped, the exit status is 0."""
    result = run(tmp_path, "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    findings = json.loads(result.stdout)
    jsonschema.validate(findings, SCHEMA)
    assert FAIL not in {finding["status"] for finding in findings}
    assert (
        list(dict.fromkeys(finding["group"] for finding in findings)) == SCHEMA["items"]["properties"]["group"]["enum"]
    )
    assert [f["status"] for f in findings if f["group"] == "live server"] == [SKIP]
    assert [f["check"] for f in findings if f["group"] == "patches"] == list(patches.REGISTRY)


def test_install_looks_at_neither_weights_nor_server(tmp_path):
    """Nor does it need them, or the variable that would drop the plugins."""
    result = run(tmp_path, "--install", MODEL="/no/such/model", VLLM_PLUGINS="")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "weights" not in result.stdout and "live server" not in result.stdout
    assert "WARN  environment  plugins: VLLM_PLUGINS= makes vLLM drop" in result.stdout
    assert result.stdout.splitlines()[-1].startswith(f"{result.stdout.count('PASS  ')} PASS, 1 WARN, 0 FAIL")
    assert "\033" not in result.stdout


def test_a_missing_model_fails(tmp_path):
    result = run(tmp_path, "--no-server", MODEL="/no/such/model", PATCH_GDN_ACCEPT_BOUNDS="0")
    assert result.returncode == 1
    assert "FAIL  weights      files: MODEL=/no/such/model: there is no such directory\n" in result.stdout
    assert "WARN  patches      gdn_accept_bounds: off." in result.stdout
    assert "live server" not in result.stdout


@pytest.mark.parametrize(
    ("found", "status"),
    [([PASS, SKIP, WARN], 0), ([PASS, FAIL, PASS], 1), ([], 0)],
)
def test_exit_status(monkeypatch, capsys, found, status):
    findings = [Finding("weights", str(index), it, "detail", "remedy") for index, it in enumerate(found)]
    monkeypatch.setattr(doctor, "examine", lambda install, live: iter(findings))
    assert doctor.main([]) == status
    assert doctor.main(["--json"]) == status
    assert f"{found.count(FAIL)} FAIL" in capsys.readouterr().out


@pytest.fixture
def examine(stock, monkeypatch, tmp_path):
    """`examine(install, live, **settings)` in this process, whose environment is put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(patching, "check", lambda importable: iter(()))

    def call(install=False, live=False, **settings):
        for name, value in {"MODE": "demo", **settings}.items():
            monkeypatch.setenv(name, value)
        return by_check(doctor.examine(install, live))

    return call


def test_wrong_settings_leave_the_weights_out(examine):
    found = examine(SPEC="medusa")
    assert found["settings"].status == FAIL and "SPEC=medusa" in found["settings"].detail
    assert found["all"].group == "weights" and found["all"].status == SKIP and "tensors" not in found


def test_an_option_that_vllm_refuses(examine, capsys):
    found = examine(EXTRA_ARGS="--no-such-option 1")
    assert found["settings"].status == FAIL and "EXTRA_ARGS" in found["settings"].remedy
    assert "--no-such-option" in capsys.readouterr().err


def test_another_vllm_stops_the_examination(examine, monkeypatch):
    monkeypatch.setattr(framework, "version", lambda name: "0.28.0+cpu")
    found = examine()
    assert found["vLLM"].status == FAIL and "settings" not in found
    assert found["all"].group == "patches" and found["all"].status == SKIP


# --- verify.sh


@pytest.mark.parametrize(
    ("present", "settings", "chosen"),
    [
        ([".venv", ".venv-cpu"], {}, ".venv"),
        ([".venv", ".venv-cpu"], {"MODE": "demo"}, ".venv-cpu"),
        ([".venv"], {"MODE": "demo"}, ".venv"),
        ([".venv-cpu"], {}, ".venv-cpu"),
        ([".venv", "mine"], {"VENV": "mine"}, "mine"),
        (["mine"], {"PYTHON": "mine/bin/python"}, "mine"),
    ],
)
def test_verify_takes_the_python_that_serves(tmp_path, present, settings, chosen):
    shutil.copy(ROOT / "verify.sh", tmp_path)
    for folder in present:
        (tmp_path / folder / "bin").mkdir(parents=True)
        program = tmp_path / folder / "bin" / "python"
        program.write_text(f'#!/bin/sh\necho {folder} "$PWD" "$@"\n')
        program.chmod(0o755)
    environ = {name: value for name, value in os.environ.items() if name not in ("MODE", "VENV", "PYTHON")} | settings
    result = subprocess.run(
        ["bash", str(tmp_path / "verify.sh"), "--json", "a b"], env=environ, cwd="/", capture_output=True, text=True
    )
    assert result.stdout == f"{chosen} {tmp_path} -m qwen38_3090.doctor --json a b\n"


def test_verify_before_set_up(tmp_path):
    shutil.copy(ROOT / "verify.sh", tmp_path)
    environ = {name: value for name, value in os.environ.items() if name not in ("MODE", "VENV")} | {"PYTHON": "false"}
    result = subprocess.run(["bash", str(tmp_path / "verify.sh")], env=environ, capture_output=True, text=True)
    assert result.returncode == 1 and "bash scripts/setup.sh" in result.stderr
