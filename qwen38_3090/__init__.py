"""Serve Qwen3.8-27B on one 24 GB card: vLLM 0.27.1, patched at import time."""

__version__ = "0.1.0"
