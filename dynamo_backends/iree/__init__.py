"""The backend `iree`."""

from dynamo_backends.compiler_objects import compiler

iree = compiler("iree")

__all__ = ["iree"]
