"""Makes fusions: tells nvFuser what a program says, a `FusionDefinition`."""

import threading
from typing import Any

from dynamo_backends.interface.errors import LoweringError, as_compile_error, first_line
from dynamo_backends.nvfuser.program import (
    Argument,
    Constant,
    FusionProgram,
    Input,
    Operation,
    Ref,
    Size,
    TypeName,
)
from dynamo_backends.nvfuser.vendor import NvFuserModule
from dynamo_backends.runtime.lru import LRU


def define(program: FusionProgram, nvfuser: NvFuserModule) -> Any:
    """Returns the `FusionDefinition` of a program, closed.

    Raises:
        LoweringError: nvFuser refuses an operation; the error names the graph's node.
        CompileError: nvFuser refuses the whole.
    """
    with as_compile_error("nvFuser refuses the fusion", first_line):
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
            limit: So many are kept at most; the least recently used go first.

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
