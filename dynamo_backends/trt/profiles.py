"""Ranges of sizes that an engine serves, from the ranges of Dynamo's symbols."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import input_storage
from dynamo_backends.graph.sizes import SIZES, Size


@dataclass(frozen=True)
class Range:
    """The shapes that an input may have.

    Attributes:
        least: The smallest size in each dimension.
        best: The shape that kernels are chosen for.
        most: The largest size in each dimension.
    """

    least: tuple[int, ...]
    best: tuple[int, ...]
    most: tuple[int, ...]

    def holds(self, shape: Sequence[int]) -> bool:
        """Returns whether a shape is within the range."""
        return len(shape) == len(self.best) and all(
            low <= n <= high for low, n, high in zip(self.least, shape, self.most, strict=True)
        )

    def joined(self, other: "Range") -> "Range":
        """The smallest range that holds this one and another, best for the other's best shape."""
        return Range(
            tuple(map(min, self.least, other.least)),
            other.best,
            tuple(map(max, self.most, other.most)),
        )

    @property
    def is_static(self) -> bool:
        """Whether there is only one shape."""
        return self.least == self.most


Profile = Mapping[str, Range]
"""Ranges by the names of a model's inputs."""


def profile(graph: Graph, names: Sequence[str | None], max_size: int) -> dict[str, Range]:
    """Returns the ranges that an engine should serve.

    Args:
        graph: For the shapes of the first call; the engine is best for these.
        names: Of the model's inputs, one per input of the graph.
        max_size: As in `TensorRTOptions`.
    """
    found: dict[str, Range] = {}
    weights = set(graph.weights)
    for i, (node, name) in enumerate(zip(graph.placeholders, names, strict=True)):
        value = node.meta["val"]
        if name is None or i in weights or not isinstance(value, Tensor):
            continue
        sizes = node.meta.get(SIZES) or tuple(value.shape)
        order = input_storage(value).order
        ranges = [_range(sizes[d], max_size) for d in order]
        best = tuple(int(value.shape[d]) for d in order)
        found[name] = Range(tuple(r[0] for r in ranges), best, tuple(r[1] for r in ranges))
    return found


def _range(size: int, max_size: int) -> tuple[int, int]:
    if not isinstance(size, Size):
        return int(size), int(size)
    upper = max_size * int(size) if size.upper is None else size.upper
    return min(size.lower, int(size)), max(upper, int(size))


def holds(served: Profile, wanted: Profile) -> bool:
    """Returns whether an engine serves the shapes that another profile is best for."""
    return served.keys() == wanted.keys() and all(
        served[name].holds(wanted[name].best) for name in wanted
    )


def joined(served: Profile, wanted: Profile) -> dict[str, Range]:
    """Returns a profile that holds both, best for the shapes of the second."""
    return {name: served[name].joined(wanted[name]) for name in wanted}


def describe(served: Profile) -> str:
    """Ranges in words, such as "x: [1..8, 3]"."""
    return ", ".join(f"{name}: [{', '.join(_dimensions(r))}]" for name, r in served.items())


def _dimensions(r: Range) -> list[str]:
    pairs = zip(r.least, r.most, strict=True)
    return [str(low) if low == high else f"{low}..{high}" for low, high in pairs]
