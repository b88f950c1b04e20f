"""Backends that compute linear layers in int8 by the book, or with one of the usual mistakes.

Products are of unsigned activations and signed weights, as processors of the x86 family multiply
them. The mistakes: a scale that is wrong by half, a zero point that is off, and sums of two
products that saturate in 16 bits, as `vpmaddubsw` of AVX2 makes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, fx, nn

from dynamo_backends.graph.graph import Graph
from dynamo_backends.int8.executable import Activations, QuantizedExecutable, left_in_float
from dynamo_backends.int8.options import Int8Options
from dynamo_backends.interface.backend import Availability, Backend
from dynamo_backends.interface.executable import Bound
from dynamo_backends.interface.plan import SUPPORTED, Support
from dynamo_backends.runtime.prepared_executables import UnfrozenExecutable

aten = torch.ops.aten

FAULTS = ("scale", "zero_point", "saturation")
FIRST = "first_scale"
"""A fault of the first product alone."""


class Net(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 48)
        self.second = nn.Linear(48, 32)

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        hidden = torch.relu(self.first(x))
        return self.second(hidden if shift is None else hidden + shift)


def net() -> Net:
    """Weights with a mean, as those of trained layers have, so that large products meet."""
    torch.manual_seed(3)
    model = Net().eval()
    with torch.no_grad():
        for layer in (model.first, model.second):
            layer.weight.add_(0.1)
    return model


def batches(count: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.rand(16, 64, generator=generator) + 0.5 for _ in range(count)]


@dataclass(frozen=True)
class PlantedOptions(Int8Options):
    """Options of the planted backends."""

    precision: Literal["float32", "int8"] = "float32"


class Planted(Backend):
    """Computes by the book."""

    name: ClassVar[str] = "planted_int8"
    fault: ClassVar[str] = ""
    Options = PlantedOptions

    def availability(self) -> Availability:
        return Availability(True, "always")

    def supports(self, node: fx.Node, options: Any) -> Support:
        return SUPPORTED

    def compile(self, graph: Graph, options: PlantedOptions) -> Any:
        if options.is_int8:
            return _Executable(graph, self.fault)
        return UnfrozenExecutable(graph, lambda *values: graph.module(*values))


def planted(fault: str) -> type[Planted]:
    """A backend with a fault."""
    return type("Faulty", (Planted,), {"name": f"planted_{fault}", "fault": fault})


class _Executable(QuantizedExecutable):
    def __init__(self, graph: Graph, fault: str):
        super().__init__(graph)
        self._fault = fault

    def prepare(self, weights: Sequence[Tensor], seen: Activations, in_float: float) -> Bound:
        observing = _Products(self.graph.module, None, self._fault)
        for activations in seen:
            observing.run(*self._merge(weights, activations))
        program = _Products(self.graph.module, observing.largest, self._fault, in_float)
        return lambda activations: list(program.run(*self._merge(weights, activations)))


class _Products(fx.Interpreter):
    """Runs a graph; products of a layer in int8 if the largest activations are known.

    Args:
        module: The graph.
        largest: By the name of the call; None: they are found out.
        fault: What is done wrong.
        in_float: The part of the products, from the first one on, that stay in float32.
    """

    def __init__(self, module: fx.GraphModule, largest: dict[str, tuple[float, float]] | None,
                 fault: str, in_float: float = 0.0):  # fmt: skip
        super().__init__(module)
        products = [n.name for n in module.graph.nodes if n.target is aten.addmm.default]
        self._first = products[0]
        self._in_float = products[: left_in_float(in_float, len(products))]
        self._known = largest
        self._fault = fault
        self.largest: dict[str, tuple[float, float]] = {}

    def run_node(self, node: fx.Node) -> Any:
        if node.op != "call_function" or node.target is not aten.addmm.default:
            return super().run_node(node)
        bias, x, weight = (self.env[a] for a in node.args)
        if self._known is None:
            low, high = self.largest.get(node.name, (0.0, 0.0))
            self.largest[node.name] = min(low, float(x.min())), max(high, float(x.max()))
            return torch.addmm(bias, x, weight)
        if node.name in self._in_float:
            return torch.addmm(bias, x, weight)
        fault = self._fault
        if fault == FIRST:
            fault = "scale" if node.name == self._first else ""
        return product(x, weight, *self._known[node.name], fault) + bias


def product(x: Tensor, weight: Tensor, low: float, high: float, fault: str = "") -> Tensor:
    """``x @ weight`` in int8: unsigned activations of one scale, signed weights, one a column."""
    scale = (high - low) / 255
    zero = round(-low / scale)
    of_weight = weight.abs().amax(0) / 127
    unsigned = (x / scale + zero).round().clamp(0, 255)
    signed = (weight / of_weight).round()
    pairs = (unsigned[:, :, None] * signed[None]).unflatten(1, (-1, 2)).sum(2)
    if fault == "saturation":
        pairs = pairs.clamp(-(1 << 15), (1 << 15) - 1)
    if fault == "zero_point":
        zero += 40
    total = pairs.sum(1) - zero * signed.sum(0)
    return total * (scale / 2 if fault == "scale" else scale) * of_weight
