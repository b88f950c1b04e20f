"""Runs TVM's programs on torch's memory."""

import json
import os
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_backends._torch_private import disable_current_modes
from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import (
    InputConverter,
    OutputConverter,
    copy_if_misaligned,
    row_major_strides,
    to_row_major,
)
from dynamo_backends.interface.errors import CompileError
from dynamo_backends.interface.executable import Bound, Executable
from dynamo_backends.interface.forks import check_not_forked
from dynamo_backends.interface.report import GraphReport
from dynamo_backends.runtime.results import restride
from dynamo_backends.tvm.program import RelaxProgram
from dynamo_backends.tvm.session import (
    Machine,
    Settings,
    dump,
    load,
    return_pooled_memory,
    use_threads,
)


class TvmExecutable(Executable):
    """The executable of one graph compiled by TVM.

    What depends on weights alone (transposed matrices, packed filters) is computed when they are
    bound, by a function of the program. Code does not depend on their values.

    Args:
        graph: The graph that was compiled, for the layouts of its inputs and outputs.
        program: The compiled program.
        settings: How it is run.
    """

    def __init__(self, graph: Graph, program: RelaxProgram, settings: Settings):
        self.program = program
        self._threads = settings.threads
        self._pid = os.getpid()
        self._machines: list[Machine] = []  # those that no thread is using
        self._lock = fork_safe_lock()
        values = [p.meta["val"] for p in graph.placeholders]
        activations, weights = graph.activations, graph.weights
        self._inputs = [_Input(activations.index(i), values[i]) for i in program.activations]
        self._weights = [weights.index(i) for i in program.weights]
        self._outputs = [_Output(node.meta["val"]) for node in graph.outputs]
        with disable_current_modes():
            self._machines.append(self._machine())  # errors show here

    def bind(self, weights: Sequence[Tensor]) -> tuple[Bound, Collection[int]]:
        """See `Executable.bind`."""
        check_not_forked(self._pid, "TVM")
        given = [weights[i].detach() for i in self._weights]
        shared = [_row_major(w) for w in given]
        if shared:
            machine = self._take()
            with disable_current_modes():
                use_threads(self._threads)
                prepared = Prepared([as_tensor(x) for x in machine.prepare(shared)])
            self._machines.append(machine)
        else:
            prepared = Prepared([])
        copied = {
            i
            for i, before, after, read in zip(
                self._weights, given, shared, self.program.transformed, strict=True
            )
            if read or before.data_ptr() != after.data_ptr()
        }
        return self._run(prepared, shared), sorted(copied)

    def _take(self) -> Machine:
        try:
            return self._machines.pop()
        except IndexError:
            return self._machine()

    def _machine(self) -> Machine:
        return Machine(self.program.module, self.program.ranged)

    def _run(self, prepared: "Prepared", shared: list[Tensor]) -> Bound:
        inputs, outputs, machines = self._inputs, self._outputs, self._machines
        known = {t.data_ptr() for t in prepared.tensors}
        threads, pid = self._threads, self._pid

        def run(values: list[Tensor]) -> list[Tensor]:
            check_not_forked(pid, "TVM")
            use_threads(threads)
            machine = self._take()
            given = [x(values[x.at]) for x in inputs]
            results = [as_tensor(x) for x in machine.main(*given, *prepared.tensors)]
            machines.append(machine)
            # An output that is an input, once optimised, is that tensor itself.
            taken = known.union(map(Tensor.data_ptr, given))
            return [y(clone_if_returned(x, taken)) for y, x in zip(outputs, results, strict=True)]

        run.keeps_alive = shared  # type: ignore[attr-defined]
        return run

    def bind_for_benchmark(
        self, weights: Sequence[Tensor], activations: Sequence[Tensor]
    ) -> Callable[[], Any]:
        """TVM's own execution, for benchmarks: everything is bound beforehand.

        Args:
            weights: As for `bind`.
            activations: As for a bound function.
        """
        machine = self._take()
        shared = [_row_major(weights[i].detach()) for i in self._weights]
        prepared = list(machine.prepare(shared)) if shared else []
        given = [x(activations[x.at]) for x in self._inputs]
        return lambda: machine.main(*given, *prepared)

    def release_memory(self) -> None:
        """See `Executable.release_memory`."""
        return_pooled_memory()

    def set_report(self, report: GraphReport) -> None:
        """See `Executable.set_report`."""
        report.tuned += self.program.tuned

    def dump(self) -> dict[str, bytes] | None:
        """See `Executable.dump`."""
        if not self.program.settled:
            return None
        return {"wiring": self.program.wiring().encode(), **dump(self.program.module)}

    @staticmethod
    def load(
        parts: dict[str, bytes],
        graph: Graph,
        settings: Settings,
        kinds: "Callable[[bool], type[TvmExecutable]]",
    ) -> "TvmExecutable":
        """Recreates an executable from `dump`.

        Args:
            parts: What was dumped.
            graph: That it was compiled for.
            settings: How it is run.
            kinds: The class of an executable, by whether it serves a range.

        Raises:
            CompileError: The parts are incomplete, or TVM refuses them.
        """
        try:
            wiring = json.loads(parts["wiring"])
            fields: dict[str, Any] = {
                k: tuple(v) if isinstance(v, list) else v for k, v in wiring.items()
            }
            program = RelaxProgram(load(parts), **fields)
            return kinds(program.ranged)(graph, program, settings)
        except Exception as error:
            raise CompileError(f"the cached TVM program cannot be used: {error}") from error


class Prepared:
    """Weights that a program has preprocessed, in TVM's memory pool.

    When it is gone, so is its memory: the pool would keep that for machines to come.

    Args:
        tensors: In the order in which the program takes them.
    """

    def __init__(self, tensors: list[Tensor]):
        self.tensors = tensors
        self._pid = os.getpid()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Gives the memory back; at the end of the interpreter, which clears modules, nothing."""
        if is_finalizing():
            return
        some = bool(self.tensors)
        self.tensors.clear()
        # Another thread of the parent may have held the pool's lock when this process was forked.
        if some and os.getpid() == self._pid:
            return_pooled_memory()


class _Input:
    """An activation that the program takes.

    Args:
        at: Its position among the activations.
        value: The fake tensor that the program was compiled for.
    """

    def __init__(self, at: int, value: Tensor):
        self.at = at
        self._check = InputConverter(value)
        order = self._check.storage.order
        self._stride = row_major_strides([value.shape[d] for d in order])

    def __call__(self, tensor: Tensor) -> Tensor:
        """Checks an input, and returns it row-major."""
        return acceptable(self._check(tensor), self._stride)


class _Output:
    """An output of the program.

    Args:
        value: The fake tensor with the promised strides.
    """

    def __init__(self, value: Tensor):
        self._export = OutputConverter(value)
        self._stride = value.stride()

    def __call__(self, tensor: Tensor) -> Tensor:
        """Returns the output as torch promises it, also where a dimension has one element."""
        result = self._export(tensor)
        return result if result.stride() == self._stride else restride(result, self._stride)


def as_tensor(value: Any) -> Tensor:
    """Returns a result as torch's tensor; TVM makes it one if an input was."""
    return value if type(value) is Tensor else torch.from_dlpack(value)


def clone_if_returned(result: Tensor, taken: set[int]) -> Tensor:
    """Returns a result, cloned if a result at the same address was returned before."""
    address = result.data_ptr()
    if address in taken and result.numel():
        return result.clone()
    taken.add(address)
    return result


def _row_major(tensor: Tensor) -> Tensor:
    return acceptable(to_row_major(tensor), row_major_strides(tensor.shape))


def acceptable(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Aligns a row-major tensor, and sets the strides that TVM expects.

    The address suits vector instructions, and strides are as expected where they do not matter too.
    """
    tensor = copy_if_misaligned(tensor)
    return tensor if tensor.stride() == stride else tensor.as_strided(tensor.shape, stride)
