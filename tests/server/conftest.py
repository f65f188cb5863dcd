"""A real server of the demo model for the tests: `python -m qwen38_3090.serve`, started once a session."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from qwen38_3090.settings import names

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 240


@dataclass
class Server:
    """A running server: its address, the name it serves, the environment it was started with and its log file."""

    port: int
    model: str
    environment: dict[str, str]
    log: Path
    process: subprocess.Popen

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.base_url}/v1", api_key=key, max_retries=0, timeout=120)

    def counter(self, name: str) -> float:
        """Sum of a Prometheus counter over its labels."""
        lines = httpx.get(f"{self.base_url}/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def clean_environment(**settings: str) -> dict[str, str]:
    """The test process's environment without what tests set for themselves, plus `settings`."""
    unwanted = {"VLLM_PLUGINS", "TRITON_INTERPRET", "VLLM_LOGGING_LEVEL", *names()}
    kept = {key: value for key, value in os.environ.items() if key not in unwanted and not key.startswith("PATCH_")}
    return kept | settings


def start(directory: Path, *arguments: str, **settings: str) -> Server:
    """Start a server of the demo model and wait until it is healthy."""
    port = free_port()
    environment = clean_environment(MODE="demo", PORT=str(port), **settings)
    log = directory / "server.log"
    with log.open("w") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "qwen38_3090.serve", *arguments],
            env=environment, cwd=directory, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    server = Server(port, "qwen3.8-demo", environment, log, process)
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server exited with {process.returncode}:\n{log.read_text()[-4000:]}")
        try:
            if httpx.get(f"{server.base_url}/health", timeout=2).status_code == 200:
                return server
        except httpx.TransportError:
            pass
        time.sleep(0.3)
    stop(server)
    raise RuntimeError(f"not healthy after {START_SECONDS} s:\n{log.read_text()[-4000:]}")


def stop(server: Server) -> None:
    """Ask the server to stop; end its process group if it doesn't."""
    server.process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        server.process.wait(timeout=20)
    with suppress(ProcessLookupError):
        os.killpg(server.process.pid, signal.SIGKILL)


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """The demo as a new user starts it: MTP, prefix caching, tools; no key."""
    running = start(tmp_path_factory.mktemp("server"))
    yield running
    stop(running)


@pytest.fixture(scope="session")
def plain_server(tmp_path_factory):
    """The same model without speculation and prefix caching, behind an API key, in a short context."""
    running = start(
        tmp_path_factory.mktemp("plain"), SPEC="off", PREFIX_CACHE="", VLLM_API_KEY="s3cret", MAX_LEN="1024"
    )
    yield running
    stop(running)
