"""Runs one ONNX Runtime session on inputs of all sizes of a range."""

from collections.abc import Sequence
from typing import Any

import torch
from onnxruntime.capi import _pybind_state as C
from torch import Tensor, fx

from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import RangedExporter, RangedImporter
from dynamo_backends.graph.sizes import SizeReader, sizes_of, strides_of
from dynamo_backends.interface.backend import Bound
from dynamo_backends.interface.errors import CompileError
from dynamo_backends.interface.forks import check_process
from dynamo_backends.ort.runtime import (
    ModelNames,
    OrtExecutable,
    bind_tensor,
    launcher,
    where_to_put,
)
from dynamo_backends.ort.session import SessionSettings, ort_device, run_options


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
        self._made: list[_Made] = []
        for name, node in zip(wiring.outputs, graph.outputs, strict=True):
            self._made.append(_Made(name, node, sum(len(y.wanted) for y in self._made)))
        self._sizes = SizeReader(places, [size for y in self._made for size in y.wanted])

    def _run(self, session: Any, live: Sequence[tuple[str, Tensor]] = ()) -> Bound:
        device, where = ort_device(self.settings.device), where_to_put(self.settings)
        launch = launcher(session, run_options(self.settings), self.settings)
        bindings: list[Any] = []  # those that no thread is using
        inputs, outputs, sizes, pid = self._given, self._made, self._sizes, self._pid

        def new_binding() -> Any:
            native = C.SessionIOBinding(session)
            for name, tensor in live:
                bind_tensor(native.bind_input, name, device, tensor)
            return native

        def run(values: list[Tensor]) -> list[Tensor]:
            check_process(pid, "ONNX Runtime")
            try:
                native = bindings.pop()
            except IndexError:
                native = new_binding()
            # The lists keep copies of unusual inputs alive while the session runs.
            given = [x.check(values[x.place]) for x in inputs]
            for x, tensor in zip(inputs, given, strict=True):
                bind_tensor(native.bind_input, x.name, device, tensor)
            numbers = sizes(values)
            results = [y.make(numbers[y.shape], where) for y in outputs]
            for y, tensor in zip(outputs, results, strict=True):
                bind_tensor(native.bind_output, y.name, device, tensor)
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


class _Made:
    """An output of the model.

    Args:
        name: In the model.
        node: In the graph.
        start: So many numbers are computed for the outputs before it.

    Attributes:
        wanted: The sizes, and if it is copied the strides, that are computed at each call.
        shape: Where the sizes are among the numbers that are computed for all outputs.
        strides: Where the strides are.
    """

    def __init__(self, name: str, node: fx.Node, start: int):
        value: Tensor = node.meta["val"]
        self.name = name
        self.dtype = value.dtype
        self.export = RangedExporter(value)
        numbers = (*sizes_of(node), *(strides_of(node) if self.export.copies else ()))
        self.wanted = [number for number in numbers if number is not None]
        if len(self.wanted) != len(numbers):
            raise CompileError(f"the sizes of the output {node.name!r} are not known")
        self.shape = slice(start, start + value.ndim)
        self.strides = slice(start + value.ndim, start + len(numbers))

    def make(self, shape: Sequence[int], device: torch.device | None) -> Tensor:
        """Memory for one result."""
        return torch.empty(self.export.dense_shape(shape), dtype=self.dtype, device=device)
