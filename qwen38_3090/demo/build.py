"""Builds the demo checkpoint, or a variant of it, in about a second. `scripts/make_demo.py` is the command."""

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file

from . import MODEL_DIR
from .chain import PHRASES
from .spec import CONTEXTUAL, DemoSpec, make_config
from .tokenizer import make_tokenizer, save_tokenizer
from .weights import make_weights

__all__ = ["CONTEXTUAL", "DemoSpec", "build"]

TEMPLATE = "chat_template.jinja"  # written by hand, and kept where it is served from


def build(folder: Path, spec: DemoSpec | None = None) -> None:
    """Write a whole checkpoint, by default the shipped one, to `folder`. The same spec gives the same bytes."""
    spec = spec or DemoSpec()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(spec.vocab_size, PHRASES)
    save_tokenizer(tokenizer, folder, spec.max_position_embeddings)
    ends = [tokenizer.token_to_id(text) for text in ("<|im_end|>", "<|endoftext|>")]
    _write_json(folder / "config.json", make_config(spec, tokenizer))
    _write_json(folder / "generation_config.json", {"eos_token_id": ends, "pad_token_id": ends[1]})
    if folder.resolve() != MODEL_DIR.resolve():
        shutil.copyfile(MODEL_DIR / TEMPLATE, folder / TEMPLATE)
    save_file(make_weights(spec, tokenizer), folder / "model.safetensors", metadata={"format": "pt"})


def _write_json(file: Path, content: dict) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
