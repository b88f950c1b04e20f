"""Defines the backend `tvm`."""

from dynamo_backends.interface.compiler import compiler

tvm = compiler("tvm")

__all__ = ["tvm"]
