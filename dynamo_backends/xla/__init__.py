"""The backend `openxla`."""

from dynamo_backends.compiler_objects import compiler

openxla = compiler("openxla")

__all__ = ["openxla"]
