"""The demo model: a small checkpoint of Qwen3.8-27B's architecture that needs no GPU.

`MODEL_DIR` holds it, ready to serve. `build.py` makes it (run `scripts/make_demo.py`), and makes variants for tests.
"""

from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
