"""scripts/serve.sh: which stack it sets up, and that it hands its arguments on."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("dotenv", "mode", "stack"),
    [(None, None, ""), ("CTX=long\n", None, ""), ("MODE=demo\n", None, "cpu"), ('MODE="demo"\n', None, "cpu"),
     ("export MODE=demo\n", None, "cpu"), ("MODE=single\n", None, ""), ("MODE=demo\n", "single", ""),
     (None, "demo", "cpu")],
)  # fmt: skip
def test_serve(tmp_path, dotenv, mode, stack):
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/serve.sh", tmp_path / "scripts")
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    (tmp_path / "scripts/setup.sh").write_text(f'echo "$@" > asked; echo {python}\n')
    if dotenv is not None:
        (tmp_path / ".env").write_text(dotenv)
    environ = {key: value for key, value in os.environ.items() if key != "MODE"} | ({"MODE": mode} if mode else {})
    command = ["bash", str(tmp_path / "scripts/serve.sh"), "--max-num-seqs", "4"]
    result = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert result.stdout == "-m qwen38_3090.serve --max-num-seqs 4\n", result.stderr
    assert (tmp_path / "asked").read_text().strip() == stack
