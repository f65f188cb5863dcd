"""The demo model's mind: for each token, the one that follows it.

The model sees little more than its last token. To write sentences all the same it walks a chain in which no token comes
twice: "\\n" (the template ends in "<think>\\n"), a thought, "</think>", "\\n\\n", the answer, "<|im_end|>".
"""

import re

import numpy as np
from tokenizers import Tokenizer

from .text import ANSWER, THOUGHT
from .tokenizer import CONTROL, MARKUP, to_alphabet


def split_into_phrases(text: str, said: set[str]) -> list[str]:
    """Words of `text`, each with the space before it; one that was `said` takes the next along. Adds to `said`."""
    phrases: list[str] = []
    phrase = ""
    for word in re.findall(r"\s*\S+\n?", text):
        phrase += word
        if phrase not in said:
            said.add(phrase)
            phrases.append(phrase)
            phrase = ""
    if phrase:
        raise ValueError(f"the text ends in words it had before: {phrase!r}")
    return phrases


def _speech() -> tuple[str, ...]:
    said: set[str] = set()
    thought = split_into_phrases(THOUGHT + "\n", said)
    return "\n", *thought, "</think>", "\n\n", *split_into_phrases(ANSWER, said), "<|im_end|>"


SPEECH = _speech()
# What it writes after the quote that opens a JSON string, and after the tag that opens a parameter of a tool call.
STRING = 'demo"'
PARAMETER = "demo\n</parameter>\n"


def _is_learned(text: str) -> bool:
    return text.isspace() or text in CONTROL + MARKUP or re.fullmatch(r" ?[A-Za-z]+", text) is not None


# The tokenizer learns plain words by itself; phrases and words with punctuation are tokens that have to be made.
PHRASES = (*(text for text in SPEECH if not _is_learned(text)), STRING, PARAMETER)


def make_chain(tokenizer: Tokenizer) -> list[int]:
    """Ids of the tokens of SPEECH, all different. Raises ValueError if one of them is no token."""
    vocab = tokenizer.get_vocab()
    written = [text if text in CONTROL + MARKUP else to_alphabet(text) for text in SPEECH]
    missing = [text for text in written if text not in vocab]
    if missing:
        raise ValueError(f"not in the vocabulary, which is too small for the text: {missing}")
    return [vocab[text] for text in written]


def make_successors(tokenizer: Tokenizer) -> np.ndarray:
    """What follows each token: int64 [vocabulary]. From outside the chain, the start of one of its sentences."""
    chain = make_chain(tokenizer)
    answer = SPEECH.index("\n\n")
    starts = [chain[i + 1] for i in range(answer, len(chain) - 2) if SPEECH[i].endswith(("\n\n", ".", "!", ":", ";"))]
    end = tokenizer.token_to_id("<|im_end|>")
    size = tokenizer.get_vocab_size()
    follows = np.array([starts[token % len(starts)] for token in range(size)])
    for token in range(size):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if text.endswith("}") or text in (STRING, PARAMETER, "</tool_call>"):
            follows[token] = end
        elif text.endswith('"'):
            follows[token] = tokenizer.token_to_id(to_alphabet(STRING))
        elif text.rstrip().endswith(">") and text not in CONTROL + MARKUP:
            follows[token] = tokenizer.token_to_id(to_alphabet(PARAMETER))
    follows[chain] = np.roll(chain, -1)  # "\n" comes after <|im_end|>, as in the chat format
    follows[tokenizer.token_to_id("<think>")] = chain[0]
    return follows
