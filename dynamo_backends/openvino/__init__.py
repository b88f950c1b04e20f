"""The backend `ov`."""

from dynamo_backends.compiler_objects import compiler

ov = compiler("ov")

__all__ = ["ov"]
