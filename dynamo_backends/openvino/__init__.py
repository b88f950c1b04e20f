"""The backend `ov`."""

from dynamo_backends.registry import compiler

ov = compiler("ov")

__all__ = ["ov"]
