"""Runs one ONNX Runtime session on inputs of all sizes of a range."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import RangedImporter
from dynamo_backends.graph.sizes import SizeReader, sizes_of
from dynamo_backends.interface.backend import Bound
from dynamo_backends.interface.forks import check_process
from dynamo_backends.ort.runtime import (
    ModelNames,
    OrtExecutable,
    bind_tensor,
    launcher,
    new_binding,
    where_to_put,
)
from dynamo_backends.ort.session import SessionSettings, ort_device, run_options
from dynamo_backends.runtime.ranged import ranged_outputs


class RangedOrtExecutable(OrtExecutable):
    """A compiled graph whose model has symbolic dimensions (see `OrtExecutable`).

    Raises:
        CompileError: The shapes of outputs do not follow from those of inputs.
    """

    serves_range = True

    def __init__(self, graph: Graph, model: bytes, wiring: ModelNames, settings: SessionSettings):
        super().__init__(graph, model, wiring, settings)
        places = [graph.placeholders[i] for i in graph.activations]
        names = [wiring.inputs[i] for i in graph.activations]
        self._given = [
            _Given(name, at, place)
            for at, (name, place) in enumerate(zip(names, places, strict=True))
            if name is not None
        ]
        self._made = ranged_outputs(graph)
        self._sizes = SizeReader(places, [size for y in self._made for size in y.wanted])

    def _run(self, session: Any, live: Sequence[tuple[str, Tensor]] = ()) -> Bound:
        device, where = ort_device(self.settings.device), where_to_put(self.settings)
        launch = launcher(session, run_options(self.settings), self.settings)
        bindings: list[Any] = []  # those that no thread is using
        inputs, outputs, sizes, pid = self._given, self._made, self._sizes, self._pid
        names = self.wiring.outputs

        def run(values: list[Tensor]) -> list[Tensor]:
            check_process(pid, "ONNX Runtime")
            try:
                native = bindings.pop()
            except IndexError:
                native = new_binding(session, device, live)
            # The lists keep copies of unusual inputs alive while the session runs.
            given = [x.check(values[x.place]) for x in inputs]
            for x, tensor in zip(inputs, given, strict=True):
                bind_tensor(native.bind_input, x.name, device, tensor)
            numbers = sizes(values)
            results = [y.make(numbers[y.shape], where) for y in outputs]
            for name, tensor in zip(names, results, strict=True):
                bind_tensor(native.bind_output, name, device, tensor)
            launch(native)
            bindings.append(native)
            return [
                y.export(tensor, numbers[y.shape], numbers[y.strides])
                for y, tensor in zip(outputs, results, strict=True)
            ]

        return run


class _Given:
    """An activation that the model has."""

    def __init__(self, name: str, place: int, node: fx.Node):
        self.name = name
        self.place = place
        self.check = RangedImporter(node.meta["val"], sizes_of(node))
