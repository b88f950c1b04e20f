"""The backend `autotune`: for each graph the fastest backend that was proven right."""

from dynamo_backends.interface.compiler import compiler

autotune = compiler("autotune")

__all__ = ["autotune"]
