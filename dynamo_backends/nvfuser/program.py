"""What a fusion is made of: nvFuser's operations, written down before nvFuser is asked.

A program depends on no concrete size. Tensors are defined with symbolic sizes (-1, but 1 where a
dimension is broadcast), and where an operation needs a size it reads it off a tensor. So one
program, and the fusion made of it, serves graphs of many shapes.

Values are numbered: the inputs first, then the results of the steps, in order.
"""

import functools
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Ref:
    """A value of the program."""

    value: int


@dataclass(frozen=True)
class Size:
    """The size of a tensor along a dimension, as nvFuser finds it when the fusion runs."""

    value: int
    dim: int


@dataclass(frozen=True)
class Constant:
    """A number.

    Attributes:
        number: It.
        dtype: Name of its type in nvFuser's `DataType`.
    """

    number: bool | int | float
    dtype: str


@dataclass(frozen=True)
class TypeName:
    """A member of nvFuser's `DataType`."""

    name: str


Argument = Ref | Size | Constant | TypeName | bool | int | tuple["Argument", ...]


@dataclass(frozen=True)
class Input:
    """A tensor that a fusion reads; the arguments of `FusionDefinition.define_tensor`.

    Attributes:
        shape: 1 for a dimension of size 1, -1 for any other.
        contiguity: In the order in which memory holds the dimensions, outermost first: None for a
            broadcast dimension, else whether the next one inside follows without a gap.
        dtype: Name in `DataType`.
        stride_order: For each dimension, how many lie inside of it in memory.
    """

    shape: tuple[int, ...]
    contiguity: tuple[bool | None, ...]
    dtype: str
    stride_order: tuple[int, ...]


@dataclass(frozen=True)
class Operation:
    """One of nvFuser's operations.

    Attributes:
        op: Its name in `fd.ops`.
        args: Its arguments, all positional.
        results: How many it has.
        origin: The graph's node that it stems from; not part of what the fusion depends on.
    """

    op: str
    args: tuple[Argument, ...]
    results: int = 1
    origin: str = field(default="", compare=False)


_MOVES = frozenset(
    {
        "broadcast",
        "broadcast_in_dim",
        "permute",
        "reshape",
        "set",
        "slice",
        "squeeze",
        "stride_order",
    }
)


@dataclass(frozen=True)
class FusionProgram:
    """A fusion.

    Attributes:
        inputs: What it reads.
        steps: In order.
        outputs: Numbers of the values that it returns, each once.
    """

    inputs: tuple[Input, ...]
    steps: tuple[Operation, ...]
    outputs: tuple[int, ...]

    @functools.cached_property
    def moved(self) -> tuple[int, ...]:
        """Positions of outputs that nvFuser may return in memory of another tensor.

        What is only moved (by views and copies) from an input, or from where another output comes
        from, it gives out as a view.
        """
        roots = list(range(len(self.inputs)))
        for step in self.steps:
            first = step.args[0] if step.args else None
            moves = step.op in _MOVES and isinstance(first, Ref)
            roots += [roots[first.value] if moves else len(roots) for _ in range(step.results)]  # type: ignore[union-attr]
        found = [roots[v] for v in self.outputs]
        return tuple(i for i, r in enumerate(found) if r < len(self.inputs) or found.count(r) > 1)

    @functools.cached_property
    def key(self) -> str:
        """Equal for programs of which one fusion can be made.

        A text, since 1, 1.0 and True are equal in Python and a NaN is not even equal to itself.
        """
        steps = [(step.op, step.args, step.results) for step in self.steps]
        return repr((self.inputs, steps, self.outputs))
