"""Defines the backend `nvfuser`."""

from dynamo_backends.interface.compiler import compiler

nvfuser = compiler("nvfuser")

__all__ = ["nvfuser"]
