"""torchvision's `nms` operators for a torchvision wheel built against another torch.

The `torchvision` on PyPI holds C++ operators for a CUDA torch. Beside torch's CPU build they don't load, and
`import torchvision` fails with "operator torchvision::nms does not exist", though a text model never calls them.
"""

from importlib.util import find_spec
from pathlib import Path

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_library: torch.library.Library | None = None


def define_missing() -> None:
    """Declare the operators that torchvision's Python code registers fake kernels for, unless they exist."""
    global _library
    if _library is not None or torch.version.cuda or _torchvision_loads_its_own():
        return
    _library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        _library.define(name + _SCHEMA)


def _torchvision_loads_its_own() -> bool:
    """Whether torchvision's C++ extension loads, found out without importing the package."""
    spec = find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return True
    libraries = list(Path(spec.submodule_search_locations[0]).glob("_C*.so"))
    try:
        for library in libraries:
            torch.ops.load_library(library)
    except OSError:
        return False
    return bool(libraries)
