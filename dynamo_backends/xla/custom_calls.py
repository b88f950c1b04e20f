"""Calls of other libraries in XLA's programs.

XLA runs them (LAPACK) while it writes over what it was given, and if one reports an error, that is
lost. A program with such calls is given nothing.
"""

from collections.abc import Iterator
from typing import Any

# Calls in StableHLO that XLA makes loops of, or that say something of a value.
_CANNOT_FAIL = frozenset({"mhlo.topk", "mhlo.erf", "Sharding", "annotate_device_placement"})


def find_custom_calls(lowered: Any) -> set[str]:
    """Returns the names of custom-call targets that may fail at run time, such as LAPACK."""
    module = lowered.compiler_ir("stablehlo")
    return set(_targets(module.operation)) - _CANNOT_FAIL


def _targets(operation: Any) -> Iterator[str]:
    for region in operation.regions:
        for block in region.blocks:
            for op in block.operations:
                if op.operation.name == "stablehlo.custom_call":
                    yield op.operation.attributes["call_target_name"].value
                yield from _targets(op.operation)
