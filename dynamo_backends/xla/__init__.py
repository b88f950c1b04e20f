"""The backend `openxla`."""

from dynamo_backends.registry import compiler

openxla = compiler("openxla")

__all__ = ["openxla"]
