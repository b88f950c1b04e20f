"""The backend `nvfuser`."""

from dynamo_backends.compiler_objects import compiler

nvfuser = compiler("nvfuser")

__all__ = ["nvfuser"]
