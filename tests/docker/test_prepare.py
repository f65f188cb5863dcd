"""docker/prepare.py, run as the container runs it: Hugging Face's own client, against a hub that the tests serve."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docker" / "prepare.py"
REPOSITORY = "dbirks/Qwen3.8-27B-W4A16-AutoRound"
MODEL = "models/Qwen3.8-27B-W4A16-AutoRound"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
INDEX = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"{}",
    "model.safetensors.index.json": json.dumps(INDEX).encode(),
    "model-00001-of-00002.safetensors": b"1" * 5000,
    "model-00002-of-00002.safetensors": b"2" * 5000,
    # Not in the index: nothing but the hub's list says that it belongs to the model.
    "model_extra_tensors.safetensors": b"3" * 5000,
}


class Hub(ThreadingHTTPServer):
    """The four requests of Hugging Face's API that a download makes. `fetched` counts the files handed out."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = dict(FILES)
        self.fetched = Counter()
        self.stall_in: str | None = None
        self.stalled = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *arguments):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.split("?")[0]
        entries = [
            {"type": "file", "path": name, "rfilename": name, "size": len(content), "oid": _etag(content)}
            for name, content in self.server.files.items()
        ]
        if path == f"/api/models/{REPOSITORY}":
            self._send(json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": entries}).encode())
        elif path == f"/api/models/{REPOSITORY}/tree/{COMMIT}":
            self._send(json.dumps(entries).encode())
        elif path.startswith(f"/{REPOSITORY}/resolve/{COMMIT}/"):
            self._send_file(path.rsplit("/", 1)[1])
        else:
            self.send_error(404)

    def _send_file(self, name):
        content = self.server.files[name]
        if self.command == "GET":
            self.server.fetched[name] += 1
        if self.command == "GET" and name == self.server.stall_in:
            self._headers(content)
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self.server.stalled.set()
            threading.Event().wait(30)
        else:
            self._send(content)

    def _headers(self, content):
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{_etag(content)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()

    def _send(self, content):
        self._headers(content)
        if self.command == "GET":
            self.wfile.write(content)


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@pytest.fixture
def hub():
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def start(tmp_path, hub):
    """start(**environ) -> the running script, in an empty working directory."""

    def start(**environ: str) -> subprocess.Popen:
        plain = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "HF_ENDPOINT": hub.url}
        return subprocess.Popen(
            [sys.executable, SCRIPT],
            cwd=tmp_path,
            env=plain | environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.fixture
def prepare(start):
    """prepare(**environ) -> exit status, standard output, standard error."""

    def prepare(**environ: str) -> tuple[int, str, str]:
        process = start(**environ)
        output, errors = process.communicate(timeout=60)
        return process.returncode, output, errors

    return prepare


def there(model: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()}


def test_downloads_everything_once(prepare, hub, tmp_path):
    status, output, errors = prepare()
    assert status == 0, errors
    assert f"downloading {REPOSITORY} to {MODEL}: 0.0 GB" in output
    assert output.endswith(f"prepare: {MODEL} is complete\n")
    assert there(tmp_path / MODEL) == FILES
    assert hub.fetched == dict.fromkeys(FILES, 1)
    # Once complete, it needs no network.
    assert prepare(HF_ENDPOINT="http://127.0.0.1:9") == (0, f"prepare: {MODEL} is complete\n", "")
    # Files that the user changed, as a requantization does, stay as they are.
    (tmp_path / MODEL / "config.json").write_text('{"changed": 1}')
    assert prepare()[0] == 0
    assert (tmp_path / MODEL / "config.json").read_text() == '{"changed": 1}'


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "model_extra_tensors.safetensors"])
def test_an_interrupted_download_goes_on_with_the_files_that_are_missing(name, start, prepare, hub, tmp_path):
    hub.files = {**{key: value for key, value in FILES.items() if key != name}, name: FILES[name]}
    hub.stall_in = name
    process = start()
    assert hub.stalled.wait(60)
    process.kill()
    process.communicate()
    assert list((tmp_path / MODEL).rglob("*.incomplete"))
    # Without a network, what is there is not taken for complete.
    status, _, errors = prepare(HF_ENDPOINT="http://127.0.0.1:9")
    assert status == 1
    assert errors.startswith(f"prepare: {REPOSITORY} was not downloaded: ")
    hub.stall_in = None
    assert prepare()[0] == 0
    assert there(tmp_path / MODEL) == FILES
    assert hub.fetched == dict.fromkeys(FILES, 1) | {name: 2}
    assert not list((tmp_path / MODEL).rglob("*.incomplete"))


def test_a_file_that_was_deleted_is_fetched_again(prepare, hub, tmp_path):
    prepare()
    (tmp_path / MODEL / "model-00001-of-00002.safetensors").unlink()
    assert prepare()[0] == 0
    assert there(tmp_path / MODEL) == FILES
    assert hub.fetched["model-00001-of-00002.safetensors"] == 2


def test_a_repository_without_what_the_index_names_is_refused(prepare, hub):
    del hub.files["model-00002-of-00002.safetensors"]
    status, _, errors = prepare()
    assert (status, errors.splitlines()[-1]) == (
        1,
        f"prepare: {REPOSITORY} came without model-00002-of-00002.safetensors.",
    )


def test_your_own_model_is_checked_and_never_downloaded(prepare, hub, tmp_path):
    own = tmp_path / "models" / "own"
    own.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (own / name).write_bytes(FILES[name])
    status, _, errors = prepare(MODEL="models/own")
    assert status == 1
    assert errors == (
        f"prepare: MODEL=models/own lacks model.safetensors.index.json. Only {MODEL} is downloaded by prepare.\n"
    )
    (own / "model.safetensors").write_bytes(b"")
    assert prepare(MODEL="models/own") == (0, "prepare: models/own is complete\n", "")
    assert not hub.fetched


def test_the_demo_needs_nothing(prepare, hub, tmp_path):
    status, output, _ = prepare(MODE="demo")
    assert (status, output) == (0, "prepare: this mode's model is part of the package: nothing to download\n")
    assert not (tmp_path / "models").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_root_becomes_the_owner_of_the_models_directory(tmp_path):
    models = tmp_path / "models"
    models.mkdir()
    os.chown(models, 12345, 23456)
    script = (
        "import os, runpy; from pathlib import Path;"
        f"prepare = runpy.run_path({str(SCRIPT)!r});"
        f"prepare['become_owner'](Path({str(models / 'new' / 'model')!r}));"
        "print(os.getresuid(), os.getresgid(), os.getgroups())"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, extra_groups=[4, 5], capture_output=True, text=True, check=True)
    assert done.stdout == "(12345, 12345, 12345) (23456, 23456, 23456) []\n"
