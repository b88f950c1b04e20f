"""Runs one TVM program on inputs of all sizes of a range."""

from torch import Tensor

from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import RangedImporter, dense_strides
from dynamo_backends.graph.sizes import SizeReader, sizes_of
from dynamo_backends.interface.backend import Bound
from dynamo_backends.interface.forks import check_process
from dynamo_backends.runtime.ranged import ranged_outputs
from dynamo_backends.tvm.program import RelaxProgram
from dynamo_backends.tvm.runtime import TvmExecutable, acceptable, as_tensor, own
from dynamo_backends.tvm.session import Settings, use_threads


class RangedTvmExecutable(TvmExecutable):
    """A compiled graph whose program has symbolic shapes (see `TvmExecutable`).

    Raises:
        CompileError: The shapes of outputs do not follow from those of inputs.
    """

    serves_range = True

    def __init__(self, graph: Graph, program: RelaxProgram, settings: Settings):
        super().__init__(graph, program, settings)
        places = [graph.placeholders[i] for i in graph.activations]
        checks = [RangedImporter(p.meta["val"], sizes_of(p)) for p in places]
        self._given = [(x.at, checks[x.at]) for x in self._inputs]
        self._made = ranged_outputs(graph)
        self._sizes = SizeReader(places, [size for y in self._made for size in y.wanted])

    def _run(self, prepared: list[Tensor], shared: list[Tensor]) -> Bound:
        given, outputs, sizes, machines = self._given, self._made, self._sizes, self._machines
        known = {t.data_ptr() for t in prepared}
        threads, pid = self._threads, self._pid

        def run(values: list[Tensor]) -> list[Tensor]:
            check_process(pid, "TVM")
            use_threads(threads)
            machine, numbers = self._take(), sizes(values)
            inputs = [check(values[at]) for at, check in given]
            inputs = [acceptable(x, dense_strides(x.shape)) for x in inputs]
            results = [as_tensor(x) for x in machine.main(*inputs, *prepared)]
            machines.append(machine)
            taken = known.union(map(Tensor.data_ptr, inputs))
            made = []
            for y, result in zip(outputs, results, strict=True):
                shape = y.export.dense_shape(numbers[y.shape])
                if result.shape != shape:
                    found = list(result.shape)
                    raise RuntimeError(f"TVM's program gives {found} instead of {list(shape)}")
                result = acceptable(own(result, taken), dense_strides(shape))
                made.append(y.export(result, numbers[y.shape], numbers[y.strides]))
            return made

        run.keeps_alive = shared  # type: ignore[attr-defined]
        return run


def kind(ranged: bool) -> type[TvmExecutable]:
    """Of executables: for a range, or for the sizes of one call."""
    return RangedTvmExecutable if ranged else TvmExecutable
