"""From a recorded step to a graph in normal form: one output per thing that the step changes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends.aot.step.program.functionalization import Functionalization
from dynamo_backends.aot.step.program.recording import WHAT_TO_DO, Recording
from dynamo_backends.graph.graph import Graph, Input, Role, drop_dead, source_line
from dynamo_backends.graph.normalize import NORMALIZE, lift_constants
from dynamo_backends.graph.passes import PassSequence
from dynamo_backends.graph.propagate import PROPAGATE
from dynamo_backends.interface.errors import StepCaptureError


@dataclass(frozen=True)
class StepGraph:
    """A whole training step in normal form.

    Attributes:
        graph: Of the kind "step". Outputs are first the new contents of inputs, in the order of
            these inputs (see `Input.updated_by`), then what the step returns or leaves behind.
        constants: One tensor per input of role CONSTANT at the end of the inputs.
        results: Position of the first of the other outputs.
    """

    graph: Graph
    constants: tuple[Tensor, ...]
    results: int


def functionalize(recording: Recording, decompositions: Any) -> StepGraph:
    """Takes the writes out of a recorded step and brings it into normal form."""
    recorded = lift_constants(recording.module)
    recording.module.recompile()
    _check_effects(recording.module.graph)
    mode = private.mode_of(list(recording.fakes))
    assert mode is not None
    _set_values(recording, list(recorded.values()), mode)
    module, updates = Functionalization(recording.module, mode, decompositions)()
    _check_effects(module.graph)
    places = _order_updates(module, updates, recording)
    made = lift_constants(module)  # by decompositions
    _fake_constants(module, len(made), mode)
    constants = (*recorded.values(), *made.values())
    drop_dead(module.graph)
    module.recompile()
    names = [p.name for p in module.graph.find_nodes(op="placeholder")]
    roles = [*recording.roles, *(Role.CONSTANT for _ in constants)]
    inputs = [
        Input(name, role, updated_by=places.get(i))
        for i, (name, role) in enumerate(zip(names, roles, strict=True))
    ]
    graph = Graph(module, "step", tuple(inputs))
    PassSequence((PROPAGATE,), given=NORMALIZE.ensures)(graph)
    return StepGraph(graph, constants, len(places))


def without_effects(recording: Recording) -> Recording:
    """Returns a recording that leaves nothing but what its calls return.

    Args:
        recording: From `capture.record`; its graph is changed.
    """
    count = 1 + max(recording.results, default=-1)
    output = recording.module.graph.output_node()
    output.args = (_outputs(recording.module)[:count],)
    recording.module.recompile()
    return replace(recording, gradients=(), batch_gradients=(), cleared=())


def without_updates(step: StepGraph) -> StepGraph:
    """Returns a graph that returns the results of a step, and changes none of its inputs.

    Args:
        step: From `functionalize`; its graph is changed.
    """
    graph, module = step.graph, step.graph.module
    module.graph.output_node().args = (tuple(_outputs(module)[step.results :]),)
    drop_dead(module.graph)
    module.recompile()
    inputs = tuple(replace(each, updated_by=None) for each in graph.inputs)
    return StepGraph(replace(graph, inputs=inputs), step.constants, 0)


def _set_values(
    recording: Recording, constants: Sequence[Tensor], mode: private.FakeTensorMode
) -> None:
    with torch.no_grad():
        fakes = [f.detach() for f in recording.fakes]
    fakes += [mode.from_tensor(c, static_shapes=True) for c in constants]
    places = recording.module.graph.find_nodes(op="placeholder")
    for place, fake in zip(places, fakes, strict=True):
        place.meta["val"] = fake


def _check_effects(graph: fx.Graph) -> None:
    for node in graph.nodes:
        target = node.target
        if isinstance(target, private.HigherOrderOperator) or private.has_effects(target):
            inner = next((a for a in node.args if isinstance(a, private.OpOverload)), node.target)
            where = source_line(node)
            raise StepCaptureError(
                f"the step calls {inner}, which can raise or act on the world in the middle of the "
                "graph" + (f" (called at {where})" if where else "") + f". {WHAT_TO_DO}"
            )


def _fake_constants(module: fx.GraphModule, count: int, mode: private.FakeTensorMode) -> None:
    places = module.graph.find_nodes(op="placeholder")
    for place in places[len(places) - count :]:
        value = place.meta["val"]
        if not isinstance(value, private.FakeTensor):
            place.meta["val"] = mode.from_tensor(value, static_shapes=True)


def _outputs(module: fx.GraphModule) -> list[Any]:
    outputs: Any = module.graph.output_node().args[0]
    return list(outputs)


def _results(recording: Recording) -> int:
    outputs: Any = recording.module.graph.output_node().args[0]
    return len(outputs)


def _order_updates(
    module: fx.GraphModule, updates: dict[int, int], recording: Recording
) -> dict[int, int]:
    """Puts updates first, in the order of the inputs; returns the output of each input.

    An input that is "updated" by itself is not updated.
    """
    outputs = _outputs(module)
    places = module.graph.find_nodes(op="placeholder")
    rest = outputs[len(outputs) - _results(recording) :]
    real = {
        place: outputs[out] for out, place in updates.items() if outputs[out] is not places[place]
    }
    ordered = sorted(real)
    module.graph.output_node().args = ((*(real[p] for p in ordered), *rest),)
    return {place: i for i, place in enumerate(ordered)}
