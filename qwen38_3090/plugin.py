"""vLLM's plugin entry points: they bring this package into every process that vLLM starts."""

from qwen38_3090 import patches
from qwen38_3090.torchvision_operators import define_missing


def register() -> None:
    """`vllm.general_plugins`: apply the patches. Called in the API server, the engine core and each worker."""
    define_missing()
    patches.apply_all()


def early() -> None:
    """`vllm.platform_plugins`: runs before transformers and torchvision are imported, when no vLLM module can be.

    Returning None tells vLLM that this is no platform of its own.
    """
    define_missing()
