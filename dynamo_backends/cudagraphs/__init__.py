"""CUDA graphs around other backends, and as backends of their own (`cudagraphs_eager`, ...)."""

from dynamo_backends.interface.compiler import compiler


def __getattr__(name: str) -> object:
    """Entry points name `dynamo_backends.cudagraphs:<backend>`."""
    if name in ("cudagraphs_eager", "nvfuser_cudagraphs"):
        return compiler(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
