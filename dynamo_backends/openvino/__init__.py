"""The backend `ov`."""

from dynamo_backends.interface.compiler import compiler

ov = compiler("ov")

__all__ = ["ov"]
