"""`prepare` in the container: download the mode's weights into its model directory, unless they are there already.

Whole files survive an interrupted download, and the next start fetches the rest. Run as root, this first becomes the
owner of the directory, so that the files belong to whoever mounted it. Exit 0: complete. Exit 1: not, with the reason.
"""

import os
import sys
from pathlib import Path

import httpx2

from qwen38_3090 import modes
from qwen38_3090.checks import weight_files
from qwen38_3090.settings import SettingError, Settings

INDEX = "model.safetensors.index.json"
UNFINISHED = ".download-unfinished"


def missing(model: Path) -> list[str]:
    """What the server needs and the directory `model` lacks: config, tokenizer and each shard that the index names."""
    names = {"config.json", "tokenizer.json", *weight_files(model)}
    if not (model / "model.safetensors").is_file():
        names.add(INDEX)
    lacking = sorted(name for name in names if not (model / name).is_file())
    return [*lacking, "the rest of its download"] if (model / UNFINISHED).exists() else lacking


def become_owner(directory: Path) -> None:
    """Give up root for the owner of `directory`, or of its nearest parent that exists."""
    owner = next(path for path in (directory, *directory.absolute().parents) if path.exists()).stat()
    if os.getuid() == 0 and owner.st_uid != 0:
        os.setgroups([])
        os.setgid(owner.st_gid)
        os.setuid(owner.st_uid)


def download(repository: str, model: Path) -> None:
    """Fetch every file of `repository` on Hugging Face into `model`. Raises OSError or httpx2.HTTPError."""
    # Its logs and caches, too, go where the owner of the models may write. Read when the library is imported.
    os.environ.setdefault("HF_HOME", str(model.absolute().parent / ".cache" / "huggingface"))
    from huggingface_hub import HfApi, snapshot_download

    # Asked for here, because without a network snapshot_download is content with whatever is in the directory.
    published = HfApi().model_info(repository, files_metadata=True)
    size = sum(file.size or 0 for file in published.siblings)
    print(f"prepare: downloading {repository} to {model}: {size / 1e9:.1f} GB", flush=True)
    model.mkdir(parents=True, exist_ok=True)
    (model / UNFINISHED).touch()
    # huggingface_hub takes up no part of a file again: drop those of a killed download, and have one at a time.
    for part in (model / ".cache" / "huggingface" / "download").rglob("*.incomplete"):
        part.unlink()
    snapshot_download(repository, revision=published.sha, local_dir=model, max_workers=1)
    for file in published.siblings:
        (model / file.rfilename).stat()
    (model / UNFINISHED).unlink()


def prepare() -> str:
    """Make the model directory complete and return what was done. Raises SettingError with what the user can do."""
    settings = Settings.read()
    mode = modes.load(settings.mode or "single")
    if mode.model is None or mode.download is None:
        return "this mode's model is part of the package: nothing to download"
    model = Path(settings.model or mode.model)
    become_owner(model)
    if lacking := missing(model):
        if model.absolute() != Path(mode.model).absolute():
            raise SettingError(f"MODEL={model} lacks {', '.join(lacking)}. Only {mode.model} is downloaded by prepare.")
        try:
            download(mode.download, model)
        except (OSError, httpx2.HTTPError) as error:
            kept = "Whole files are kept: start again to fetch the rest."
            raise SettingError(f"{mode.download} was not downloaded: {error}. {kept}") from error
        if lacking := missing(model):
            raise SettingError(f"{mode.download} came without {', '.join(lacking)}.")
    return f"{model} is complete"


if __name__ == "__main__":
    try:
        print(f"prepare: {prepare()}")
    except SettingError as error:
        sys.exit(f"prepare: {error}")
