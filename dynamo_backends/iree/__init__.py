"""The backend `iree`."""

from dynamo_backends.registry import compiler

iree = compiler("iree")

__all__ = ["iree"]
