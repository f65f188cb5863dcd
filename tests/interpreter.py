"""Run vLLM's Triton kernels, and ours, on CPU tensors in Triton's interpreter. Call `boot()` before importing vllm.

vLLM keeps Triton when its version says "cpu" and Triton lists a "cpu" backend, so one is listed while vLLM decides.
The interpreter has no body for libdevice's functions; numpy supplies the ones that vLLM's kernels call.
"""

import os


def boot() -> None:
    """Switch the interpreter on. Does nothing where an NVIDIA GPU runs the kernels."""
    import torch

    if torch.cuda.is_available():
        return
    os.environ["TRITON_INTERPRET"] = "1"
    import numpy as np
    import triton.backends
    import triton.language.extra.libdevice as libdevice

    class CpuBackend:
        driver = None
        compiler = None

    triton.backends.backends["cpu"] = CpuBackend
    import vllm.triton_utils  # noqa: F401  (decides on import whether there is Triton)

    del triton.backends.backends["cpu"]
    for name in ("log1p", "expm1", "tanh"):
        setattr(libdevice, name, _elementwise(getattr(np, name)))


def _elementwise(function):
    import triton.language.core as core
    from triton.runtime.interpreter import TensorHandle

    def call(x, _semantic=None, **_):
        values = function(x.handle.data).astype(x.handle.data.dtype)
        return core.tensor(TensorHandle(values, x.handle.dtype), x.type)

    return call
