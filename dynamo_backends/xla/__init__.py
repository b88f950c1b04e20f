"""The backend `openxla`."""

from dynamo_backends.interface.compiler import compiler

openxla = compiler("openxla")

__all__ = ["openxla"]
