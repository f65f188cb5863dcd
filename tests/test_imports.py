"""Imports go one way: what DESIGN calls lower layers never imports a higher one, and kernels know no model."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# layer -> prefixes that its modules must not import
FORBIDDEN = {
    "patches": ("qwen38_3090.serve", "qwen38_3090.launch", "qwen38_3090.settings", "qwen38_3090.doctor"),
    "qwen38_3090/kernels": ("qwen38_3090", "vllm", "transformers"),
    "qwen38_3090/drafting": ("vllm", "qwen38_3090.patches", "qwen38_3090.serve", "qwen38_3090.launch"),
    "qwen38_3090/quantization": ("vllm", "qwen38_3090.patches", "qwen38_3090.serve", "qwen38_3090.launch"),
    "qwen38_3090/settings.py": ("vllm", "torch", "qwen38_3090."),
    "qwen38_3090/launch.py": ("vllm", "torch", "qwen38_3090.serve", "qwen38_3090.doctor"),
}


def _files(layer):
    path = ROOT / layer
    return sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.is_file() else []


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize(("layer", "file"), [(layer, file) for layer in FORBIDDEN for file in _files(layer)])
def test_layer_does_not_reach_up(layer, file):
    for name in _imports(file):
        assert not name.startswith(FORBIDDEN[layer]), f"{file.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("file", _files("patches"))
def test_patch_modules_import_vllm_only_when_applied(file):
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in tree.body:
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", "") or ""]
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            assert not any(name.split(".")[0] == "vllm" for name in names)
