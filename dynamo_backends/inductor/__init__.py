"""The backends `inductor_freezing` and `inductor_max_autotune`."""

from dynamo_backends.interface.compiler import compiler

inductor_freezing = compiler("inductor_freezing")
inductor_max_autotune = compiler("inductor_max_autotune")

__all__ = ["inductor_freezing", "inductor_max_autotune"]
