"""Runs one OpenVINO model on inputs of all sizes of a range."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import disable_current_modes
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.symbolic_sizes import distinct_varying_sizes
from dynamo_backends.interface.executable import Bound
from dynamo_backends.interface.forks import check_not_forked
from dynamo_backends.openvino.core_api import (
    CompileSettings,
    as_openvino_tensor,
    find_passthrough_outputs,
    make_infer_request,
)
from dynamo_backends.openvino.lowering import LoweredOpenVino
from dynamo_backends.openvino.runtime import OpenVinoExecutable
from dynamo_backends.openvino.vendor import CompiledModel
from dynamo_backends.runtime.ranged_calls import RangedLayout

aten = torch.ops.aten


class RangedOpenVinoExecutable(OpenVinoExecutable):
    """Runs one model with dynamic dimensions on all sizes of a range.

    After the graph's inputs the model has those of the graph's sizes that it reads, as scalars.

    Raises:
        CompileError: Sizes do not follow from the shapes of inputs.
    """

    serves_range = True

    def __init__(
        self,
        graph: Graph,
        lowered: LoweredOpenVino,
        settings: CompileSettings,
        compiled: CompiledModel | None = None,
    ):
        super().__init__(graph, lowered, settings, compiled)
        further = zip(
            distinct_varying_sizes(graph), lowered.inputs[len(graph.inputs) :], strict=True
        )
        arguments = [(size, place) for size, place in further if place is not None]
        self._scalars = [place for _, place in arguments]
        self._layout = RangedLayout(graph, [size for size, _ in arguments])

    def _run(
        self,
        compiled: CompiledModel,
        constants: Sequence[int],
        weights: dict[int, Tensor] | None = None,
    ) -> Bound:
        self._running.add(compiled)
        moved, layout, pid = self.renumber_inputs(constants), self._layout, self._pid
        inputs = [(x.at, moved[x.place], layout.checks[x.at]) for x in self._activations]
        scalars = [moved[place] for place in self._scalars]
        live = {moved[p]: t for p, t in (weights or {}).items() if p not in constants}
        copies = find_passthrough_outputs(compiled)
        written = [place for place in range(len(layout.outputs)) if place not in copies]
        input_ports, output_ports = compiled.inputs, compiled.outputs
        requests: list[_Request] = []  # those that no thread is using

        def run(values: list[Tensor]) -> list[Tensor]:
            check_not_forked(pid, "OpenVINO")
            try:
                request = requests.pop()
            except IndexError:
                request = _Request(compiled, scalars, live)
            native, numbers = request.native, layout.numbers(values)
            # These keep the memory alive while the request uses it.
            given = request.given.copy()
            for at, place, check in inputs:
                given[place] = tensor = check(values[at])
                native.set_input_tensor(place, as_openvino_tensor(tensor, input_ports[place]))
            for number, write in zip(numbers, request.write, strict=False):
                write(number)
            results = layout.allocate_outputs(numbers)
            for place in written:
                native.set_output_tensor(
                    place, as_openvino_tensor(results[place], output_ports[place])
                )
            native.infer({}, share_outputs=True, decode_strings=False)
            for place, source in copies.items():
                results[place] = given[source].clone().view(results[place].shape)
            requests.append(request)
            return layout.export_results(results, numbers)

        run.kept = weights  # type: ignore[attr-defined] # constants share their memory
        return run

    def size_inputs(self, activations: Sequence[Tensor]) -> dict[int, Tensor]:
        """Returns the model inputs that carry symbolic sizes, by index."""
        numbers = self._layout.numbers(activations)
        return {p: torch.tensor(n) for p, n in zip(self._scalars, numbers, strict=False)}


class _Request:
    """Holds an inference request and its size inputs; used by one call at a time.

    Args:
        compiled: What runs.
        scalars: Places of the sizes.
        live: Weights that are inputs, by their places.

    Attributes:
        given: By their places, the inputs that are known already.
        write: Functions that note the sizes of a call, one each.
    """

    def __init__(self, compiled: CompiledModel, scalars: Sequence[int], live: dict[int, Tensor]):
        self.native = make_infer_request(compiled)
        # Calls may be made in other modes than the one that the memory is made in.
        with torch.inference_mode(False), disable_current_modes():
            memory = {p: torch.empty((), dtype=torch.int64, device="cpu") for p in scalars}
        self.given = {**live, **memory}
        self.write = [_writer(tensor) for tensor in memory.values()]
        for place, tensor in self.given.items():
            self.native.set_input_tensor(place, as_openvino_tensor(tensor, compiled.inputs[place]))


def _writer(tensor: Tensor) -> Callable[[int], None]:
    return tensor.numpy().fill


def preserves_nonempty(node: fx.Node) -> bool:
    """Returns whether a call on non-empty inputs never has an empty result."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise in tags or node.target in (aten.view.default, aten.reshape.default)
