"""Wrong kernels, planted where a backend's compiled graphs and steps are made."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.planned_decomposition import fingerprint_with_plan
from dynamo_backends.interface.executable import Bound, Executable, StepProgram
from dynamo_backends.pipeline.program_builder import ProgramBuilder


def _same(value: Any) -> Any:
    return value


def _upper_half_twice(weight: Tensor) -> Tensor:
    """What a kernel reads that forgets where a slice begins."""
    half = len(weight) // 2
    return torch.cat([weight[:half], weight[:half]]) if weight.dim() == 2 else weight


def _transposed(weight: Tensor) -> Tensor:
    square = weight.dim() == 2 and weight.shape[0] == weight.shape[1]
    return weight.detach().t().contiguous() if square else weight


def _through_floats(result: Tensor) -> Tensor:
    return result if result.is_floating_point() else result.float().to(result.dtype)


def _tenth_more(result: Tensor) -> Tensor:
    return result * 1.1 if result.is_floating_point() else result


@dataclass(frozen=True)
class Fault:
    """What is wrong with compiled code.

    Attributes:
        weights: What becomes of each weight before compiled code sees it.
        inputs: The like, for the other inputs.
        results: The like, for results.
        kinds: Of which graphs.
    """

    weights: Callable[[Tensor], Tensor] = _same
    inputs: Callable[[Tensor], Tensor] = _same
    results: Callable[[Tensor], Tensor] = _same
    kinds: Collection[str] = ("inference", "forward", "backward")


FAULTS: dict[str, Fault] = {
    "an offset dropped": Fault(weights=_upper_half_twice),
    "a transposed weight": Fault(weights=_transposed),
    "a NaN lost": Fault(results=torch.nan_to_num),
    "a stale buffer": Fault(inputs=torch.zeros_like),
    "a wrong gradient": Fault(results=_tenth_more, kinds=("backward",)),
    "an integer division through floats": Fault(results=_through_floats),
}


class Net(nn.Module):
    """Reads the second half of a weight, and a square one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.both = nn.Parameter(torch.randn(12, 6))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.first(x).relu(), self.both[6:]) * 2 + 1


def divide(x: Tensor, y: Tensor) -> Tensor:
    return (x // y) * 2 + x


class _Planted(Executable):
    """Compiled code with a fault."""

    def __init__(self, inner: Executable, graph: Graph, planted: "Planted"):
        self._inner = inner
        self._kind = graph.kind
        self._planted = planted

    def bind(self, weights: Sequence[Tensor]) -> tuple[Bound, Collection[int]]:
        fault = self._planted.fault
        if self._kind not in fault.kinds:
            return self._inner.bind(weights)
        bound, copied = self._inner.bind([fault.weights(w.detach()) for w in weights])

        def run(activations: list[Tensor]) -> list[Tensor]:
            self._planted.calls += 1
            given = [fault.inputs(x) if isinstance(x, Tensor) else x for x in activations]
            return list(map(fault.results, bound(given)))

        return run, copied


@dataclass
class Planted:
    """Plants a fault in all that is compiled; equal graphs are compiled once.

    Attributes:
        fault: The fault.
        calls: How often code with a fault ran.
    """

    fault: Fault = field(default_factory=Fault)
    calls: int = 0
    made: dict[str, Executable] = field(default_factory=dict)

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        compile_block = ProgramBuilder._compile_block

        def planted(builder: ProgramBuilder, graph: Graph) -> Executable:
            mark = fingerprint_with_plan(graph, builder._plan)
            if mark not in self.made:
                self.made[mark] = compile_block(builder, graph)
            return _Planted(self.made[mark], graph, self)

        monkeypatch.setattr(ProgramBuilder, "_compile_block", planted)


class WrongStep(StepProgram):
    """Changes one input by a tenth more than it should."""

    def __init__(self, inner: StepProgram, graph: Graph):
        self._inner = inner
        updates = [i for i, x in enumerate(graph.inputs) if x.updated_by is not None]
        values = [graph.placeholders[i].meta["val"] for i in updates]
        self._place = updates[next(k for k, v in enumerate(values) if v.is_floating_point())]

    def __call__(self, inputs: Sequence[Tensor], taken: list[Any]) -> None:
        target = inputs[self._place].detach()
        before = target.clone()
        self._inner(inputs, taken)
        target = inputs[self._place].detach()
        target.add_((target - before) * 0.1)
        self.launches += 1

    def outputs(self, taken: list[Any]) -> list[Tensor]:
        return self._inner.outputs(taken)
