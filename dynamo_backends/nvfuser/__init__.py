"""The backend `nvfuser`."""

from dynamo_backends.registry import compiler

nvfuser = compiler("nvfuser")

__all__ = ["nvfuser"]
