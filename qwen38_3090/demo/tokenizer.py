"""The demo model's tokenizer: byte-level BPE with Qwen's splitting rule and special tokens, learned from `text.py`."""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from .text import training_text

# How Qwen3.5 cuts text before BPE. transformers builds its tokenizer with this rule whatever tokenizer.json says.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# In Qwen's order. Control tokens vanish from decoded text; markup tokens stay, because parsers look for them in it.
CONTROL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
MARKUP = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)


def to_alphabet(text: str) -> str:
    """`text` as byte-level BPE writes it in its vocabulary: one printable character for each UTF-8 byte."""
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return "".join(piece for piece, _ in pieces)


def make_tokenizer(vocab_size: int, whole: tuple[str, ...] = ()) -> Tokenizer:
    """A tokenizer of exactly `vocab_size` tokens: bytes, learned merges, the `whole` strings, then CONTROL and MARKUP.

    A `whole` string is a token for the model to write. Encoding never gives it, because no merge leads to it. Raises
    ValueError if the training text is too short for `vocab_size`.
    """
    tokenizer = _empty(BPE())
    learned_size = vocab_size - len(whole) - len(CONTROL) - len(MARKUP)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=learned_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(training_text(), trainer)
    learned = json.loads(tokenizer.to_str())["model"]
    vocab = learned["vocab"] | {to_alphabet(text): learned_size + index for index, text in enumerate(whole)}
    if len(vocab) != learned_size + len(whole):
        raise ValueError(
            f"{len(vocab)} distinct tokens, {learned_size + len(whole)} wanted: change vocab_size or the text"
        )
    tokenizer = _empty(BPE(vocab, [tuple(pair) for pair in learned["merges"]]))
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in CONTROL])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in MARKUP])
    return tokenizer


def _empty(model: BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json to `folder`."""
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=False), encoding="utf-8")
    config = {
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": max_length,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "Qwen3_5Tokenizer",
        "unk_token": None,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
