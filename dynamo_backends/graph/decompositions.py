"""Which composite operators are taken apart, and by which of torch's own decompositions."""

import functools
from collections.abc import Callable, Collection
from typing import Any

from dynamo_backends._torch_private import OpOverload, core_aten_decompositions


@functools.cache
def _core() -> dict[OpOverload, Callable[..., Any]]:
    return dict(core_aten_decompositions())


def decompositions(keep: Collection[OpOverload]) -> dict[OpOverload, Callable[..., Any]]:
    """torch's core ATen decompositions, without the operators that a backend takes whole.

    Args:
        keep: Overloads that the backend handles itself, because that is faster or more exact.
    """
    return {op: rule for op, rule in _core().items() if op not in keep}
