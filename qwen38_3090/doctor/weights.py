"""The model's directory: files, tensors by their headers, quantization, tokenizer, chat template. Loads no weights."""

from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from qwen38_3090 import checks
from qwen38_3090.doctor import tensors
from qwen38_3090.doctor.finding import FAIL, PASS, WARN, Finding, split_remedy
from qwen38_3090.doctor.tensors import Packing, Packings, Tensor
from qwen38_3090.modes import Mode
from qwen38_3090.mtp_ignore import forgotten_modules
from qwen38_3090.settings import SettingError

_found = partial(Finding, "weights")
_AGAIN = "Download the model again."

# One token each for Qwen's chat format and for vLLM's reasoning and tool parsers.
TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_start|>", "<|im_end|>")
CARD_GIB = 24
GIB = 2**30


def check(parsed: Namespace, mode: Mode) -> Iterator[Finding]:
    """All checks of this group on the model of vLLM's parsed command line."""
    method = (parsed.speculative_config or {}).get("method")
    directory = Path(parsed.model)
    try:
        checks.check_model(parsed.model, method, mode.download if parsed.model == mode.model else None)
        headers = read_headers(directory)
    except SettingError as error:
        yield _found("files", FAIL, *split_remedy(str(error)))
        return
    size = sum((directory / name).stat().st_size for name in headers) / GIB
    yield _found("files", PASS, f"{directory}, weights in {len(headers)} file(s) of together {size:.3g} GiB")
    yield from _index(directory, headers)
    yield from _tensors(directory, _flat(headers), method == "mtp", mode)
    yield from _tokenizer(parsed)


def read_headers(directory: Path) -> dict[str, dict[str, Tensor]]:
    """File name -> tensor name -> shape and dtype, for all weight files. Raises SettingError for a damaged file."""
    return {
        file: {name: Tensor(shape, (dtype,)) for name, (shape, dtype) in checks.header(directory / file).items()}
        for file in checks.weight_files(directory)
    }


def _flat(headers: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor for file in headers.values() for name, tensor in file.items()}


def _index(directory: Path, headers: dict[str, dict[str, Tensor]]) -> Iterator[Finding]:
    """The index and the files agree on what is where."""
    places = checks.read_index(directory)
    if places is None:
        return
    missing = [f"{name} in {file}" for name, file in places.items() if name not in headers[file]]
    strays = [f"{name} in {file}" for file, held in headers.items() for name in held if places.get(name) != file]
    if missing:
        yield _found("index", FAIL, f"it names tensors that are not there: {_some(missing)}", _AGAIN)
    if strays:
        remedy = "Put the index and the files of one version of the model together."
        yield _found("index", WARN, f"vLLM will load tensors that it does not name: {_some(strays)}", remedy)
    if not missing and not strays:
        yield _found("index", PASS, f"{len(places)} tensors, each in its file")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _tensors(directory: Path, held: dict[str, Tensor], mtp: bool, mode: Mode) -> Iterator[Finding]:
    """What the config makes vLLM load is there, with the right shapes and dtypes."""
    from vllm.transformers_utils.config import get_config

    try:
        config = get_config(str(directory), trust_remote_code=False)
        text = config.get_text_config()
        matrices = tensors.matrices(text, mtp)
        vocabulary = tensors.vocabulary_matrices(text)
        wanted = tensors.others(text, mtp)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        yield _found("tensors", FAIL, f"{directory}/config.json can't be used ({error})", _AGAIN)
        return
    try:
        packings = Packings(getattr(config, "quantization_config", None) or {})
    except (KeyError, ValueError) as error:
        detail = f"quantization_config is of a kind that this check does not know ({error})"
        yield _found("tensors", WARN, detail, "This project is made for W4A16 checkpoints (pack-quantized).")
        return
    unlisted = []
    for module, shape in (matrices | vocabulary).items():
        packing = packings.of(module, linear=module in matrices)
        if packing and f"{module}.weight" in held:
            unlisted.append(module)
            packing = None
        wanted |= packing.tensors(module, *shape) if packing else {f"{module}.weight": Tensor(shape)}
    forgotten = set(forgotten_modules(directory)) if mtp else ()
    if forgotten:
        detail = f"serve lists {len(forgotten)} MTP matrices in quantization_config.ignore, which the file forgets"
        yield _found("MTP", PASS, detail)
    unlisted = [module for module in unlisted if module not in forgotten]
    if unlisted:
        detail = f"bf16, but not listed in quantization_config.ignore, so vLLM fails to load them: {_some(unlisted)}"
        quoted = ", ".join(f'"{module}"' for module in unlisted)
        yield _found("quantization_config", FAIL, detail, f"Add to that list in {directory}/config.json: {quoted}")
    problems = [problem for name, tensor in wanted.items() if (problem := _differs(name, tensor, held.get(name)))]
    if problems:
        detail = f"{len(problems)} of {len(wanted)} are not as the config says: {_some(problems)}"
        yield _found("tensors", FAIL, detail, _AGAIN)
        return
    yield _found(
        "tensors", PASS, f"{len(wanted)} are there with the config's shapes{', MTP among them' if mtp else ''}"
    )
    if mode.stack == "cuda":
        packed = [module for module in matrices if f"{module}.weight_packed" in held]
        yield from _size(held, packed, [*vocabulary, *(name for name in matrices if name.startswith("mtp."))])


def _differs(name: str, wanted: Tensor, found: Tensor | None) -> str | None:
    if found is None:
        return f"{name} is missing"
    if found.shape != wanted.shape:
        return f"{name} is {list(found.shape)} instead of {list(wanted.shape)}"
    if found.dtypes[0] not in wanted.dtypes:
        return f"{name} is {found.dtypes[0]} instead of {' or '.join(wanted.dtypes)}"
    return None


def _size(held: dict[str, Tensor], packed: list[str], optional: list[str]) -> Iterator[Finding]:
    """What a 24 GB card has to hold, and what could be smaller."""
    if not packed:
        yield _found(
            "quantization", WARN, f"none: the body in bf16 does not fit {CARD_GIB} GB", "Use a W4A16 checkpoint."
        )
        return
    yield _found("quantization", PASS, f"W4A16, {len(packed)} matrices packed")
    large = {name: held[f"{name}.weight"].shape for name in optional if f"{name}.weight" in held}
    if not large:
        yield _found("int8", PASS, "lm_head, embedding and MTP are packed")
        return
    now = sum(2 * rows * columns for rows, columns in large.values())
    saved = now - sum(_packed_bytes(Packing(8, 128), *shape) for shape in large.values())
    names = dict.fromkeys("MTP" if name.startswith("mtp.") else name.rpartition(".")[2] for name in large)
    detail = f"{', '.join(names)} in bf16 take {now / GIB:.2f} GiB; in int8 they would take {saved / GIB:.2f} GiB less"
    remedy = (
        "A prepare step of a later version packs them; until then lower CTX, MAX_LEN or MAX_SEQS if memory is short."
    )
    yield _found("int8", WARN, detail, remedy)


def _packed_bytes(packing: Packing, rows: int, columns: int) -> int:
    """Bytes of a packed matrix with 16-bit scales."""
    return rows * (columns * packing.bits // 8 + 2 * -(-columns // packing.group))


def _tokenizer(parsed: Namespace) -> Iterator[Finding]:
    """The tokenizer as vLLM loads it: the markers are single tokens, and a chat can be rendered."""
    from vllm.tokenizers import get_tokenizer

    directory = Path(parsed.tokenizer or parsed.model)
    try:
        content = checks.read_json(directory / "tokenizer.json")
        vocabulary = content.get("model", {}).get("vocab")
        if "added_tokens" not in content or not isinstance(vocabulary, dict):
            raise ValueError("no vocabulary")
        tokenizer = get_tokenizer(str(directory), trust_remote_code=parsed.trust_remote_code)
    except SettingError as error:
        yield _found("tokenizer", FAIL, *split_remedy(str(error)))
        return
    except (OSError, ValueError, TypeError, KeyError) as error:
        yield _found("tokenizer", FAIL, f"{directory}/tokenizer.json can't be loaded ({error})", _AGAIN)
        return
    counts = {token: len(tokenizer.encode(token, add_special_tokens=False)) for token in TOKENS}
    split = [f"{token} ({count})" for token, count in counts.items() if count != 1]
    if split:
        yield _found("tokenizer", FAIL, f"tokens that must be one are several: {', '.join(split)}", _AGAIN)
    else:
        yield _found("tokenizer", PASS, f"{', '.join(TOKENS)} are one token each")
    yield _chat_template(tokenizer, parsed.chat_template)


def _chat_template(tokenizer: Any, other: str | None) -> Finding:
    if other:
        return _found("chat template", PASS, f"--chat-template {other}")
    if not tokenizer.chat_template:
        return _found(
            "chat template", FAIL, "none, so chat completions fail", f"{_AGAIN} chat_template.jinja belongs to it."
        )
    try:
        chat = [{"role": "user", "content": "Hello"}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        return _found("chat template", FAIL, f"it fails on a plain question ({error})", _AGAIN)
    return _found("chat template", PASS, f"a question becomes {text!r}")
