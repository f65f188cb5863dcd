"""Shared by all tests: no plugin patches the test process by itself, Triton kernels run in the interpreter."""

import os
from contextlib import contextmanager
from importlib import import_module

# vLLM in this process stays stock (only the torchvision gap is filled): a test applies the patch it is about.
os.environ["VLLM_PLUGINS"] = "qwen38_3090_early"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import pytest
import torch

from qwen38_3090.torchvision_operators import define_missing
from tests import interpreter

define_missing()
interpreter.boot()


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture
def patched():
    """`with patched("name") as module:` runs the block with that one patch applied, and reverts it."""

    @contextmanager
    def applied(name):
        module = import_module(f"qwen38_3090.patches.{name}")
        module.PATCH.verify()
        module.apply()
        try:
            yield module
        finally:
            module.revert()

    return applied
