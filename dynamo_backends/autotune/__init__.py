"""The backend `autotune`: for each graph the fastest backend whose results were verified."""

from dynamo_backends.interface.compiler import compiler

autotune = compiler("autotune")

__all__ = ["autotune"]
