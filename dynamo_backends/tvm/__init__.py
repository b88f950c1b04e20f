"""The backend `tvm`."""

from dynamo_backends.registry import compiler

tvm = compiler("tvm")

__all__ = ["tvm"]
