"""Defines the backend `iree`."""

from dynamo_backends.interface.compiler import compiler

iree = compiler("iree")

__all__ = ["iree"]
