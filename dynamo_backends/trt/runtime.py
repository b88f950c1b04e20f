"""Runs engines on torch's memory and streams."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import InputConverter, OutputConverter, to_row_major
from dynamo_backends.interface.errors import CompileError
from dynamo_backends.interface.executable import Bound, Executable
from dynamo_backends.interface.report import GraphReport
from dynamo_backends.runtime.prepared_executables import Prologue
from dynamo_backends.trt.device import driver, to_tensorrt
from dynamo_backends.trt.engine import Engine
from dynamo_backends.trt.program import Lease, SharedEngine


class TensorRTExecutable(Executable):
    """A compiled graph for concrete shapes.

    Weights of floating-point types are the engine's own and are set when they are bound; others,
    such as masks and positions, are inputs that share torch's memory.

    Args:
        graph: What remains after the prologue, for the layouts of its inputs and outputs.
        program: What runs it, and perhaps other shapes of it.
        from_disk: The program was not built by this process.
        prologue: Makes the weights of `graph`.

    Raises:
        CompileError: The program is not of this graph.
    """

    def __init__(self, graph: Graph, program: SharedEngine, from_disk: bool, prologue: Prologue):
        self.graph = graph
        self.program = program
        self.from_disk = from_disk
        self._prologue = prologue
        plan = program.plan
        values = [p.meta["val"] for p in graph.placeholders]
        self._device = torch.device(driver().kind, program.settings.device)
        inner = owned_weights(graph)
        self._owned = [(k, str(plan.inputs[i])) for k, i in enumerate(graph.weights)
                       if i in inner and plan.inputs[i] is not None]  # fmt: skip
        self._shared = [_Input(k, str(plan.inputs[i]), values[i])
                        for k, i in enumerate(graph.weights)
                        if i not in inner and plan.inputs[i] is not None]  # fmt: skip
        self._inputs = [_Input(k, str(plan.inputs[i]), values[i])
                        for k, i in enumerate(graph.activations)
                        if plan.inputs[i] is not None]  # fmt: skip
        fakes = [node.meta["val"] for node in graph.outputs]
        self._outputs = [_Output(n, v) for n, v in zip(plan.outputs, fakes, strict=True)]
        self._check()
        ranged = {name for name, r in plan.profile.items() if not r.is_static}
        self._shapes = [(x.name, x.shape) for x in (*self._inputs, *self._shared)
                        if x.name in ranged]  # fmt: skip

    def _check(self) -> None:
        """Refuses a program whose inputs and outputs are not this graph's."""
        places = (*self._inputs, *self._shared, *self._outputs)
        expected = {x.name: to_tensorrt(x.dtype) for x in places}
        if self.program.tensors != expected:
            raise CompileError(
                f"the engine has the tensors {self.program.tensors}, but the graph needs {expected}"
            )

    def bind(self, weights: Sequence[Tensor]) -> tuple[Bound, Collection[int]]:
        """See `Executable.bind`."""
        key = tuple(map(Tensor.data_ptr, weights))
        made = self._prologue(weights)
        shared = [(x.name, self._given(x, made)) for x in self._shared]
        copied = {k for k, _ in self._owned}
        for x, (_, tensor) in zip(self._shared, shared, strict=True):
            if tensor.data_ptr() != made[x.place].data_ptr():
                copied.add(x.place)
        lease = self.program.lease(key, self.owned(made))
        return self._run(lease, shared), self._prologue.copied_positions(copied)

    def owned(self, weights: Sequence[Tensor]) -> dict[str, Tensor]:
        """Returns the weights of the engine by their names, row-major.

        Args:
            weights: Those that the prologue has made.
        """
        return {name: to_row_major(weights[k]) for k, name in self._owned}

    def _run(self, lease: Lease, shared: Sequence[tuple[str, Tensor]]) -> Bound:
        inputs, outputs, device = self._inputs, self._outputs, self._device

        def run(values: list[Tensor]) -> list[Tensor]:
            # The lists keep copies of unusual inputs alive until the work is launched.
            given = [(x.name, self._given(x, values)) for x in inputs]
            results = [torch.empty(y.shape, dtype=y.dtype, device=device) for y in outputs]
            made = [(y.name, self._somewhere(r)) for y, r in zip(outputs, results, strict=True)]
            launch(lease.engine, [*given, *shared, *made], self._shapes, device)
            return [y.export(r) for y, r in zip(outputs, results, strict=True)]

        return run

    def _given(self, x: "_Input", values: Sequence[Tensor]) -> Tensor:
        tensor = x.check(values[x.place])
        if tensor.device.type != self._device.type:  # a number
            tensor = tensor.to(self._device)
        return self._somewhere(tensor)

    def _somewhere(self, tensor: Tensor) -> Tensor:
        """Returns the tensor, or for an empty one some memory: TensorRT takes no null pointers."""
        return tensor if tensor.numel() else torch.empty(1, dtype=torch.uint8, device=self._device)

    @property
    def shares_weights(self) -> bool:
        """Returns whether it reads weights in torch's memory."""
        return bool(self._shared)

    def described_inputs(self) -> list[tuple[str, Tensor]]:
        """Names in the model and fake tensors of the inputs that are no weights."""
        values = [self.graph.placeholders[i].meta["val"] for i in self.graph.activations]
        return [(x.name, values[x.place]) for x in self._inputs]

    def described_outputs(self) -> list[tuple[str, Tensor]]:
        """Names in the model and fake tensors of the outputs."""
        values = [node.meta["val"] for node in self.graph.outputs]
        return [(y.name, v) for y, v in zip(self._outputs, values, strict=True)]

    def set_report(self, report: GraphReport) -> None:
        """See `Executable.set_report`."""
        report.cache_hits += self.from_disk


def launch(
    engine: Engine,
    tensors: Sequence[tuple[str, Tensor]],
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    device: torch.device,
) -> None:
    """Runs an engine on torch's current stream (see `Engine.run`)."""
    with driver().stream(device.index) as stream:
        context = engine.take_context(stream)
        scratch = engine.run(context, stream, tensors, shapes, device)
        engine.give_context(stream, context)
    del scratch  # torch may use its memory again, now that its stream waits for the engine


def owned_weights(graph: Graph) -> set[int]:
    """Returns positions of the inputs that an engine holds as refittable weights."""
    return {i for i in graph.weights if graph.placeholders[i].meta["val"].dtype.is_floating_point}


class _Place:
    def __init__(self, name: str, value: Tensor, shape: tuple[int, ...]):
        self.name = name
        self.dtype = value.dtype
        self.shape = shape


class _Input(_Place):
    """An input of the model."""

    def __init__(self, place: int, name: str, value: Tensor):
        self.place = place
        self.check = InputConverter(value)
        super().__init__(name, value, self.check.dense_shape)


class _Output(_Place):
    """An output of the model."""

    def __init__(self, name: str, value: Tensor):
        self.export: Any = OutputConverter(value)
        shape = self.export.storage.dense_shape(value.shape)
        super().__init__(name, value, tuple(map(int, shape)))
