"""Runs one ONNX Runtime session on inputs of all sizes of a range."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface.executable import Bound
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
from dynamo_backends.runtime.ranged import RangedLayout


class RangedOrtExecutable(OrtExecutable):
    """A compiled graph whose model has symbolic dimensions (see `OrtExecutable`).

    Raises:
        CompileError: The shapes of outputs do not follow from those of inputs.
    """

    serves_range = True

    def __init__(self, graph: Graph, model: bytes, wiring: ModelNames, settings: SessionSettings):
        super().__init__(graph, model, wiring, settings)
        self._layout = RangedLayout(graph)

    def _run(self, session: Any, live: Sequence[tuple[str, Tensor]] = ()) -> Bound:
        device, where = ort_device(self.settings.device), where_to_put(self.settings)
        launch = launcher(session, run_options(self.settings), self.settings)
        bindings: list[Any] = []  # those that no thread is using
        layout, pid, names = self._layout, self._pid, self.wiring.outputs
        inputs = [(x.name, x.place, layout.checks[x.place]) for x in self._inputs]

        def run(values: list[Tensor]) -> list[Tensor]:
            check_process(pid, "ONNX Runtime")
            try:
                native = bindings.pop()
            except IndexError:
                native = new_binding(session, device, live)
            # The list keeps copies of unusual inputs alive while the session runs.
            given = [(name, check(values[place])) for name, place, check in inputs]
            for name, tensor in given:
                bind_tensor(native.bind_input, name, device, tensor)
            numbers = layout.numbers(values)
            results = layout.make(numbers, where)
            for name, tensor in zip(names, results, strict=True):
                bind_tensor(native.bind_output, name, device, tensor)
            launch(native)
            bindings.append(native)
            return layout.export(results, numbers)

        return run
