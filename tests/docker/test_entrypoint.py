"""docker/entrypoint.sh, run in a tree of its own with stand-ins for Python and verify.sh that note their calls."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ENTRYPOINT = Path(__file__).parents[2] / "docker" / "entrypoint.sh"
VERIFY = "verify.sh --no-server"


@pytest.fixture
def app(tmp_path):
    """The container's /app: the entrypoint, verify.sh, and `python` first on PATH. Behaviour hangs on the files
    `fail-NAME` (exit with that status) and `wait-NAME` (run until a signal comes)."""
    (tmp_path / "docker").mkdir()
    (tmp_path / "bin").mkdir()
    shutil.copy(ENTRYPOINT, tmp_path / "docker" / "entrypoint.sh")
    for name, file in (("python", tmp_path / "bin" / "python"), ("verify.sh", tmp_path / "verify.sh")):
        file.write_text(
            f"""#!/bin/bash
            echo "$$ {name} $*" >>calls
            if [ -e wait-{name} ]; then
                trap 'echo "$$ {name} got TERM" >>calls; exit 0' TERM
                while true; do sleep 0.05; done
            fi
            if [ -e fail-{name} ]; then exit "$(cat fail-{name})"; fi
            """
        )
        file.chmod(0o755)
    return tmp_path


@pytest.fixture
def start(app):
    """start(*arguments) -> the running entrypoint. Its working directory is another one: it finds /app by itself."""
    processes = []

    def start(*arguments: str) -> subprocess.Popen:
        environ = {"PATH": f"{app / 'bin'}:{os.environ['PATH']}"}
        command = ["bash", app / "docker" / "entrypoint.sh", *arguments]
        process = subprocess.Popen(
            command, cwd="/", env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def calls(app: Path) -> list[str]:
    """The calls without their process ids."""
    file = app / "calls"
    return [line.split(" ", 1)[1] for line in file.read_text().splitlines()] if file.exists() else []


def await_call(app: Path, text: str) -> int:
    """Wait for a call; its process id."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for line in (app / "calls").read_text().splitlines() if (app / "calls").exists() else []:
            if line.split(" ", 1)[1] == text:
                return int(line.split(" ", 1)[0])
        time.sleep(0.02)
    raise AssertionError(f"no call '{text}' in {calls(app)}")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], [VERIFY, "python -m qwen38_3090.serve"]),
        (["serve"], [VERIFY, "python -m qwen38_3090.serve"]),
        (["serve", "--seed", "1"], [VERIFY, "python -m qwen38_3090.serve --seed 1"]),
        (["--seed", "1"], [VERIFY, "python -m qwen38_3090.serve --seed 1"]),
        (["prepare"], ["python docker/prepare.py"]),
        (["verify", "--json"], ["verify.sh --json"]),
        (["python", "-c", "pass"], ["python -c pass"]),
    ],
)
def test_verbs(app, start, arguments, expected):
    process = start(*arguments)
    assert process.wait(10) == 0
    assert calls(app) == expected


def test_arguments_keep_their_spaces(start):
    process = start("printf", "[%s]", "a b", "", "*")
    assert process.communicate(timeout=10)[0] == "[a b][][*]"


def test_an_installation_that_fails_its_check_does_not_serve(app, start):
    (app / "fail-verify.sh").write_text("1")
    assert start("serve").wait(10) == 1
    assert calls(app) == [VERIFY]


@pytest.mark.parametrize(
    ("arguments", "program"),
    [
        (["serve"], "python"),
        (["prepare"], "python"),
        (["python"], "python"),
        (["verify"], "verify.sh"),
    ],
)
def test_exit_status_is_the_programs(app, start, arguments, program):
    (app / f"fail-{program}").write_text("7")
    assert start(*arguments).wait(10) == 7


def test_a_command_that_does_not_exist(start):
    assert start("no-such-command").wait(10) == 127


@pytest.mark.parametrize(
    ("arguments", "call"),
    [
        (["serve"], "python -m qwen38_3090.serve"),
        (["prepare"], "python docker/prepare.py"),
        (["python", "x"], "python x"),
    ],
)
def test_the_program_takes_the_containers_place_and_its_signals(app, start, arguments, call):
    (app / "wait-python").touch()
    process = start(*arguments)
    assert await_call(app, call) == process.pid
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    assert calls(app)[-1] == "python got TERM"


def test_a_stop_during_the_check_ends_the_check_and_serves_nothing(app, start):
    (app / "wait-verify.sh").touch()
    process = start("serve")
    await_call(app, VERIFY)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 143
    await_call(app, "verify.sh got TERM")
    assert not [call for call in calls(app) if call.startswith("python")]
