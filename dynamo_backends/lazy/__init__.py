"""The backends `ltc` and `ltc_trace`: torch's Lazy Tensor Core."""

from dynamo_backends.interface.compiler import compiler

ltc = compiler("ltc")
ltc_trace = compiler("ltc_trace")

__all__ = ["ltc", "ltc_trace"]
