"""vLLM's plugin entry points: they bring this package into every process that vLLM starts."""


def register() -> None:
    """`vllm.general_plugins`: apply the patches. Called in the API server, the engine core and each worker."""
    from qwen38_3090.patches import apply_all

    apply_all()


def early() -> None:
    """`vllm.platform_plugins`: runs before transformers and torchvision are imported, when no vLLM module can be.

    Returning None tells vLLM that this is no platform of its own.
    """
    from qwen38_3090.torchvision_operators import define_missing

    define_missing()
