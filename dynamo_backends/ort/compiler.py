"""Lowers a graph to ONNX and makes an executable of it, for one set of sizes or a range."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir
from torch import Tensor

from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface.errors import CompileError, reraise_as_compile_error
from dynamo_backends.interface.executable import Bound
from dynamo_backends.interface.forks import check_not_forked
from dynamo_backends.onnx.lowering import lower_to_onnx
from dynamo_backends.ort.runtime import (
    ModelNames,
    OrtExecutable,
    bind_tensor,
    launcher,
    new_binding,
    output_device,
)
from dynamo_backends.ort.session import SessionSettings, ort_device, plain_message, run_options
from dynamo_backends.runtime.ranged_calls import RangedLayout, make_for_range


def compile_graph(graph: Graph, settings: SessionSettings) -> OrtExecutable:
    """Lowers a graph to ONNX and makes the ONNX Runtime executable that runs it.

    Args:
        graph: For concrete shapes. Where these come from symbolic ones, one model serves a range.
        settings: Of its sessions.

    Raises:
        LoweringError: A call cannot be lowered; it names the node.
        CompileError: ONNX Runtime refuses the model.
    """
    return make_for_range(
        graph, lambda ranged: _compile(graph, settings, ranged and not settings.graphs)
    )


def _compile(graph: Graph, settings: SessionSettings, ranged: bool) -> OrtExecutable:
    lowered = lower_to_onnx(graph, ranged)
    model = ir.to_proto(lowered.model).SerializeToString()
    names = ModelNames(lowered.inputs, lowered.outputs)
    with reraise_as_compile_error("ONNX Runtime cannot load the model", plain_message):
        return _kind(ranged)(graph, model, names, settings)


def load(parts: Mapping[str, bytes], graph: Graph, settings: SessionSettings) -> OrtExecutable:
    """Recreates an executable from `OrtExecutable.dump`.

    Raises:
        CompileError: The parts are incomplete, or ONNX Runtime refuses them.
    """
    try:
        kept = json.loads(parts["wiring"])
        wiring = ModelNames(tuple(kept["inputs"]), tuple(kept["outputs"]))
        executable = _kind(kept["ranged"])(graph, parts["model"], wiring, settings)
        if (len(wiring.inputs), len(wiring.outputs)) != (len(graph.inputs), len(graph.outputs)):
            raise ValueError("it was compiled for another graph")
        return executable
    except Exception as error:
        raise CompileError(f"the cached ONNX model cannot be used: {error}") from error


def _kind(ranged: bool) -> type[OrtExecutable]:
    return RangedOrtExecutable if ranged else OrtExecutable


class RangedOrtExecutable(OrtExecutable):
    """An executable whose ONNX model has symbolic dimensions and serves many sizes.

    Raises:
        CompileError: The shapes of outputs do not follow from those of inputs.
    """

    serves_range = True

    def __init__(self, graph: Graph, model: bytes, wiring: ModelNames, settings: SessionSettings):
        super().__init__(graph, model, wiring, settings)
        self._layout = RangedLayout(graph)

    def _run(self, session: Any, live: Sequence[tuple[str, Tensor]] = ()) -> Bound:
        device, where = ort_device(self.settings.device), output_device(self.settings)
        launch = launcher(session, run_options(self.settings), self.settings)
        bindings: list[Any] = []  # those that no thread is using
        layout, pid, names = self._layout, self._pid, self.wiring.outputs
        inputs = [(x.name, x.place, layout.checks[x.place]) for x in self._inputs]

        def run(values: list[Tensor]) -> list[Tensor]:
            check_not_forked(pid, "ONNX Runtime")
            try:
                native = bindings.pop()
            except IndexError:
                native = new_binding(session, device, live)
            # The list keeps copies of unusual inputs alive while the session runs.
            given = [(name, check(values[place])) for name, place, check in inputs]
            for name, tensor in given:
                bind_tensor(native.bind_input, name, device, tensor)
            numbers = layout.numbers(values)
            results = layout.allocate_outputs(numbers, where)
            for name, tensor in zip(names, results, strict=True):
                bind_tensor(native.bind_output, name, device, tensor)
            launch(native)
            bindings.append(native)
            return layout.export_results(results, numbers)

        return run
