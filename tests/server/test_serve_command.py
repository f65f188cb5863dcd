"""`python -m qwen38_3090.serve` with bad input: one sentence, exit status 2, before anything loads; and --dry-run."""

import json
import socket
import subprocess
import sys

import pytest

from qwen38_3090.demo import MODEL_DIR
from tests.server.conftest import clean_environment


def run(directory, *words, **settings):
    return subprocess.run(
        [sys.executable, *words],
        env=clean_environment(**settings), cwd=directory, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def serve(directory, *arguments, **settings):
    return run(directory, "-m", "qwen38_3090.serve", *arguments, **settings)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"SPEC": "medusa"}, "SPEC=medusa: it must be off | mtp | dflash2"),
        ({"CTX": "big"}, "CTX=big: it must be fast | long | huge"),
        ({"MODE": "turbo"}, "MODE=turbo: it must be single | batch | demo"),
        ({"DRAFT_TOKENS": "0"}, "DRAFT_TOKENS=0:"),
        ({"DRAFT_TOKENS": "many"}, "DRAFT_TOKENS=many:"),
        ({"LOOKUP": "1"}, "not in this version yet"),
        ({"MODE": "single"}, "bash scripts/setup.sh cuda"),
    ],
)
def test_a_wrong_setting(tmp_path, settings, sentence):
    result = serve(tmp_path, **settings)
    assert result.returncode == 2
    assert result.stderr.startswith("qwen38_3090: ") and sentence in result.stderr
    assert "Traceback" not in result.stderr


def test_a_missing_model(tmp_path):
    result = serve(tmp_path, MODEL=str(tmp_path / "none"))
    assert result.returncode == 2 and "there is no such directory" in result.stderr


def test_a_model_without_tokenizer(tmp_path):
    for path in MODEL_DIR.iterdir():
        if path.name != "tokenizer.json":
            (tmp_path / path.name).symlink_to(path)
    result = serve(tmp_path, MODEL=str(tmp_path))
    assert result.returncode == 2 and "tokenizer.json is missing" in result.stderr


def test_a_path_with_dflash_in_it(tmp_path):
    link = tmp_path / "Qwen-DFlash2"
    link.symlink_to(MODEL_DIR)
    result = serve(tmp_path, MODEL=str(link))
    assert result.returncode == 2 and "ln -s" in result.stderr


def test_a_port_in_use(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = serve(tmp_path, PORT=str(taken.getsockname()[1]))
    assert result.returncode == 2 and "another program listens there" in result.stderr


def test_an_option_that_vllm_does_not_know(tmp_path):
    result = serve(tmp_path, "--no-such-option", "1")
    assert result.returncode == 2 and "--no-such-option" in result.stderr


def test_dry_run(tmp_path):
    result = serve(tmp_path, "--dry-run", "--", "--max-num-seqs", "2", VLLM_API_KEY="s3cret", CTX="long")
    assert result.returncode == 0, result.stderr
    command = next(line for line in result.stdout.splitlines() if "vllm serve" in line)
    assert command.endswith("--max-num-seqs 2") and "--max-model-len 32768" in command and str(MODEL_DIR) in command
    assert "VLLM_CPU_KVCACHE_SPACE=1" in result.stdout and "  cpu_mamba_align\n" in result.stdout
    assert "s3cret" not in result.stdout


def test_dot_env_is_read_and_the_environment_wins(tmp_path):
    (tmp_path / ".env").write_text("CTX=long\nMAX_SEQS=3\nPATCH_GDN_ACCEPT_BOUNDS=0\nVLLM_CPU_KVCACHE_SPACE=7\n")
    result = serve(tmp_path, "--dry-run", MAX_SEQS="5")
    assert "--max-model-len 32768" in result.stdout and "--max-num-seqs 5" in result.stdout
    assert "  gdn_accept_bounds\n" not in result.stdout and "VLLM_CPU_KVCACHE_SPACE=1" not in result.stdout


def test_another_vllm_version(tmp_path):
    """A `vllm` distribution of another version earlier on the path is what the launcher finds."""
    metadata = tmp_path / "vllm-0.28.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.28.0\n")
    result = serve(tmp_path, PYTHONPATH=str(tmp_path))
    assert result.returncode == 2
    assert "patches vLLM 0.27.1 and no other version; installed is 0.28.0" in result.stderr


def test_a_patched_function_that_differs(tmp_path):
    """With a changed copy of vLLM's scheduler in place of the installed one, the server refuses and names the patch."""
    program = tmp_path / "changed.py"
    program.write_text(
        "from qwen38_3090.patches import patch\n"
        "tree = patch._tree\n"
        "class Other:\n"
        "    def __call__(self, module):\n"
        "        import ast, importlib.util\n"
        "        text = open(importlib.util.find_spec(module).origin).read()\n"
        "        if module == 'vllm.v1.core.sched.scheduler':\n"
        "            text = text.replace('def _mamba_block_aligned_split(', 'def _mamba_block_aligned_split_2(')\n"
        "        return ast.parse(text)\n"
        "patch._tree = Other()\n"
        "from qwen38_3090.serve import main\n"
        "main([])\n"
    )
    result = run(tmp_path, str(program))
    assert result.returncode == 2
    assert "patch align_block_size refuses: vllm.v1.core.sched.scheduler:Scheduler._mamba_block" in result.stderr


def test_help_lists_the_settings(tmp_path):
    result = serve(tmp_path, "--help")
    assert result.returncode == 0 and "DRAFT_TOKENS" in result.stdout and "VLLM_API_KEY" in result.stdout


def test_the_demo_model_is_json_readable():
    assert json.loads((MODEL_DIR / "config.json").read_text())["architectures"] == ["Qwen3_5ForConditionalGeneration"]
