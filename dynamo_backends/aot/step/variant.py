"""One compiled step: for one kind of batch, as long as its guards hold."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dynamo_backends import report as reporting
from dynamo_backends.aot.step.backends import StepBackend
from dynamo_backends.aot.step.capture import Definition, record
from dynamo_backends.aot.step.draws import hoist
from dynamo_backends.aot.step.functional import functionalize
from dynamo_backends.aot.step.guards import Guards
from dynamo_backends.aot.step.inventory import Inventory
from dynamo_backends.aot.step.whole import until_done
from dynamo_backends.graph.canonicalize import CANONICALIZE
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.partition import count_ops
from dynamo_backends.graph.passes import NORMAL_FORM, PassSequence, Property
from dynamo_backends.graph.random import SEPARATE_DRAWS
from dynamo_backends.report import GraphReport

_PASSES = PassSequence((CANONICALIZE, SEPARATE_DRAWS), given=NORMAL_FORM | {Property.STATIC})


class Variant:
    """A step that was captured and compiled.

    Args:
        definition: What to capture.
        backend: What compiles it.
        inventory: What lives on.
        batch: The leaves of the arguments that it is captured with.
        batch_spec: How they are put together.

    Raises:
        StepCaptureError: It cannot be one graph, or the backend cannot run all of it.
        Strangers: It uses tensors that the inventory does not have.
    """

    def __init__(
        self,
        definition: Definition,
        backend: StepBackend,
        inventory: Inventory,
        batch: Sequence[Any],
        batch_spec: Any,
    ):
        start = time.perf_counter()
        recording = record(definition, inventory, batch, batch_spec)
        self._recording = recording
        self.guards = Guards(definition, inventory, recording)
        step = functionalize(recording, backend.decompositions)
        _PASSES(step.graph)
        self.graph, self._draw = hoist(step.graph)
        self._constants = step.constants
        captured = time.perf_counter()
        self.program = backend.compile(self.graph)
        self.report = _report(backend.name, self.graph, time.perf_counter() - captured)
        self.report.cache_hits = int(self.program.from_disk)
        self.program.report_to(self.report)
        self.capture_seconds = captured - start
        reporting.publish(self.report)

    def __call__(
        self, tensors: Sequence[Tensor], numbers: tuple[float, ...], batch: Sequence[Any]
    ) -> Any:
        """Runs one step.

        Args:
            tensors: One per slot of the inventory.
            numbers: The numbers of this step.
            batch: The leaves of the arguments.
        """
        recording = self._recording
        inputs = [torch.tensor(numbers, dtype=torch.float64), *tensors]
        inputs += [tensors[i].grad for i in recording.gradient_slots]  # type: ignore[misc]
        inputs += [x for x in batch if isinstance(x, Tensor)]
        inputs += [*self._constants, *self._draw()]
        taken: list[Any] = []
        try:
            self.program(inputs, taken)
            return self._finish(taken, tensors, numbers)
        except BaseException:
            if taken:
                until_done(lambda: self._leave_gradients(taken, tensors))
            raise

    def _finish(
        self, taken: list[Any], tensors: Sequence[Tensor], numbers: tuple[float, ...]
    ) -> Any:
        return self._result(self._leave_gradients(taken, tensors), tensors, numbers)

    def _leave_gradients(self, taken: list[Any], tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sets what gradients the step leaves; returns its outputs. May be repeated."""
        outputs = self.program.outputs(taken)
        for i in self._recording.cleared:
            if tensors[i].grad is not None:
                tensors[i].grad = None
        for output, i in self._recording.gradients:
            tensors[i].grad = outputs[output]
        return outputs

    def _result(
        self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], numbers: tuple[float, ...]
    ) -> Any:
        recording = self._recording
        sources: dict[str, Any] = {
            "output": lambda i: outputs[i],
            "slot": lambda i: tensors[i],
            "term": lambda term: term.evaluate(numbers).item(),
            "constant": lambda value: value,
        }
        leaves = [sources[result.kind](result.value) for result in recording.results]
        return pytree.tree_unflatten(leaves, recording.spec)


def _report(backend: str, graph: Graph, seconds: float) -> GraphReport:
    report = GraphReport(backend, "step", compile_seconds=seconds, executables=1, blocks=1)
    report.ops_on_backend = count_ops(graph.calls)
    return report
