"""Where a program keeps the values of a graph while it runs."""

from collections.abc import Iterable, Iterator, Sequence

import sympy
from torch import fx

from dynamo_backends.graph.sizes import FloatOfSizes, Size, SizeReader
from dynamo_backends.runtime.program import Instruction, Literal, pick


class Registers:
    """Numbers of registers: of a graph's inputs, then of what its parts compute, then of sizes.

    Args:
        inputs: Names of the graph's inputs.
    """

    def __init__(self, inputs: Iterable[str]):
        self._of = {name: i for i, name in enumerate(inputs)}
        self._inputs = len(self._of)
        self._sizes: dict[sympy.Expr, tuple[int, Size | FloatOfSizes]] = {}

    def __len__(self) -> int:
        """Counts the registers of values and of sizes."""
        return len(self._of) + len(self._sizes)

    def add(self, names: Iterable[str]) -> None:
        """Gives registers to values; before any size gets one."""
        for name in names:
            self._of.setdefault(name, len(self._of))

    def of(self, name: str) -> int:
        """Returns the register of a value."""
        return self._of[name]

    def of_size(self, size: Size | FloatOfSizes) -> int:
        """Returns the register of a size, or a float of sizes, that differs from call to call."""
        return self._sizes.setdefault(size.expression, (len(self), size))[0]

    def sizes_computed(self, places: Sequence[fx.Node]) -> Iterator[Instruction]:
        """What computes the sizes, if any, at the start of a program.

        Args:
            places: The graph's inputs.

        Raises:
            CompileError: A size does not follow from the inputs' shapes.
        """
        if self._sizes:
            numbers = tuple(number for number, _ in self._sizes.values())
            read = SizeReader(places, [size for _, size in self._sizes.values()])
            yield Instruction(read, pick(range(self._inputs)), numbers, ())


def dead_after(
    reads: Sequence[Sequence[int]],
    writes: Sequence[Sequence[int]],
    outputs: Sequence[int | Literal],
) -> list[tuple[int, ...]]:
    """Returns the registers that nobody reads after each part.

    Args:
        reads: Of each part.
        writes: Of each part.
        outputs: Of the graph.
    """
    last: dict[int, int] = {}
    for i, (read, written) in enumerate(zip(reads, writes, strict=True)):
        last.update(dict.fromkeys((*read, *written), i))
    kept = {x for x in outputs if isinstance(x, int)}
    return [
        tuple(r for r, at in last.items() if at == i and r not in kept) for i in range(len(reads))
    ]
