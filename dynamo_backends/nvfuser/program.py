"""A fusion as data: nvFuser's operations, written down, then told to a `FusionDefinition`.

A program depends on no concrete size. Tensors are defined with symbolic sizes (-1, but 1 where a
dimension is broadcast), and where an operation needs a size it reads it off a tensor. So one
program, and the fusion made of it, serves graphs of many shapes.

Values are numbered: the inputs first, then the results of the steps, in order.
"""

import functools
import threading
from dataclasses import dataclass, field
from typing import Any

from dynamo_backends.interface.errors import LoweringError, first_line, reraise_as_compile_error
from dynamo_backends.nvfuser.vendor import NvFuserModule
from dynamo_backends.runtime.cache import LRU


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
    """A number that is part of a fusion.

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
    """A recorded fusion, as a program that reads sizes from tensors.

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


def define(program: FusionProgram, nvfuser: NvFuserModule) -> Any:
    """Returns the `FusionDefinition` of a program, closed.

    Raises:
        LoweringError: nvFuser refuses an operation; the error names the graph's node.
        CompileError: nvFuser refuses the whole.
    """
    with reraise_as_compile_error("nvFuser refuses the fusion", first_line):
        fd = nvfuser.definition()
        with fd:
            _Replay(fd, nvfuser).run(program)
        return fd


class _Replay:
    """Runs a program's steps on an open definition.

    Args:
        fd: The definition.
        nvfuser: Whose it is.
    """

    def __init__(self, fd: Any, nvfuser: NvFuserModule):
        self._fd = fd
        self._nvfuser = nvfuser
        self._values: list[Any] = []
        self._sizes: dict[Size, Any] = {}

    def run(self, program: FusionProgram) -> None:
        self._values += [self._input(x) for x in program.inputs]
        for step in program.steps:
            try:
                self._step(step)
            except Exception as error:
                reason = f"nvFuser refuses its {step.op}: {first_line(error)}"
                raise LoweringError(step.origin, step.op, reason) from error
        for value in program.outputs:
            self._fd.add_output(self._values[value])

    def _input(self, x: Input) -> Any:
        return self._fd.define_tensor(
            shape=list(x.shape),
            contiguity=list(x.contiguity),
            dtype=self._nvfuser.dtype(x.dtype),
            stride_order=list(x.stride_order),
        )

    def _step(self, step: Operation) -> None:
        arguments = [self._argument(a) for a in step.args]
        results = getattr(self._fd.ops, step.op)(*arguments)
        self._values += [results] if step.results == 1 else list(results)

    def _argument(self, argument: Argument) -> Any:
        if isinstance(argument, Ref):
            return self._values[argument.value]
        if isinstance(argument, Size):
            return self._size(argument)
        if isinstance(argument, Constant):
            kind = self._nvfuser.dtype(argument.dtype)
            return self._fd.define_scalar(argument.number, dtype=kind)
        if isinstance(argument, TypeName):
            return self._nvfuser.dtype(argument.name)
        if isinstance(argument, tuple):
            return [self._argument(a) for a in argument]
        return argument

    def _size(self, size: Size) -> Any:
        if size not in self._sizes:
            self._sizes[size] = self._fd.ops.size(self._values[size.value], size.dim)
        return self._sizes[size]


class Fusions:
    """The fusions of this process, found by what they depend on.

    Graphs that differ in sizes only, or instances of one module, share a fusion and with it the
    kernels that nvFuser has compiled.

    Attributes:
        made: How many were made.
        found: How often one was there already.
    """

    def __init__(self) -> None:
        self._fusions: LRU[str, Any] = LRU(0)
        self._lock = threading.Lock()  # definitions under way share a global state of nvFuser's
        self.made = 0
        self.found = 0

    def __len__(self) -> int:
        """Returns how many are kept."""
        return len(self._fusions)

    def get(self, program: FusionProgram, nvfuser: NvFuserModule, limit: int) -> Any:
        """Returns the fusion of a program, made if there is none yet.

        Args:
            program: What it computes.
            nvfuser: What defines it.
            limit: Largest number to keep; the least recently used are evicted first.

        Raises:
            LoweringError: nvFuser refuses an operation.
            CompileError: nvFuser refuses the whole.
        """
        with self._lock:
            fusion = self._fusions.get(program.key)
            if fusion is None:
                fusion = define(program, nvfuser)
                self.made += 1
            else:
                self.found += 1
            self._fusions.most = limit
            self._fusions.put(program.key, fusion)
        return fusion

    def clear(self) -> None:
        """Forgets all; graphs that are compiled keep theirs."""
        with self._lock:
            self._fusions.clear()
            self.made = self.found = 0


FUSIONS = Fusions()
