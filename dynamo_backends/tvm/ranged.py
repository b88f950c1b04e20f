"""Runs one TVM program on inputs of all sizes of a range."""

from torch import Tensor

from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import row_major_strides
from dynamo_backends.interface.executable import Bound
from dynamo_backends.interface.forks import check_not_forked
from dynamo_backends.runtime.ranged_calls import RangedLayout
from dynamo_backends.tvm.program import RelaxProgram
from dynamo_backends.tvm.runtime import (
    Prepared,
    TvmExecutable,
    acceptable,
    as_tensor,
    clone_if_returned,
)
from dynamo_backends.tvm.session import Settings, use_threads


class RangedTvmExecutable(TvmExecutable):
    """A compiled graph whose program has symbolic shapes (see `TvmExecutable`).

    Raises:
        CompileError: The shapes of outputs do not follow from those of inputs.
    """

    serves_range = True

    def __init__(self, graph: Graph, program: RelaxProgram, settings: Settings):
        super().__init__(graph, program, settings)
        self._layout = RangedLayout(graph)

    def _run(self, prepared: Prepared, shared: list[Tensor]) -> Bound:
        layout, machines = self._layout, self._machines
        given = [(x.at, layout.checks[x.at]) for x in self._inputs]
        known = {t.data_ptr() for t in prepared.tensors}
        threads, pid = self._threads, self._pid

        def run(values: list[Tensor]) -> list[Tensor]:
            check_not_forked(pid, "TVM")
            use_threads(threads)
            machine, numbers = self._take(), layout.numbers(values)
            inputs = [check(values[at]) for at, check in given]
            inputs = [acceptable(x, row_major_strides(x.shape)) for x in inputs]
            results = [as_tensor(x) for x in machine.main(*inputs, *prepared.tensors)]
            machines.append(machine)
            layout.require_shapes(results, numbers, "TVM")
            taken = known.union(map(Tensor.data_ptr, inputs))
            results = [
                acceptable(clone_if_returned(x, taken), row_major_strides(x.shape)) for x in results
            ]
            return layout.export_results(results, numbers)

        run.keeps_alive = shared  # type: ignore[attr-defined]
        return run


def executable_class(ranged: bool) -> type[TvmExecutable]:
    """Returns the kind of executables: for a range, or for the sizes of one call."""
    return RangedTvmExecutable if ranged else TvmExecutable
