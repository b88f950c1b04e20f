"""The backend `tvm`."""

from dynamo_backends.compiler_objects import compiler

tvm = compiler("tvm")

__all__ = ["tvm"]
