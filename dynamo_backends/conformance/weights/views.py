"""Views of weights: folded or shared, they begin where they should.

A weight may be read through a view (a slice, a chunk, a transpose), and be one itself: of other
memory, from an offset on, with gaps or in another order.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, layer_norm, linear

from dynamo_backends.conformance.comparing import assert_same
from dynamo_backends.conformance.registering import Table
from dynamo_backends.conformance.subject import Function, Subject

CHECKS = Table()

WIDTH = 16
"""Features."""

Case = Callable[["Weights", Tensor], Tensor]


class Weights(nn.Module):
    """Weights of all layouts, and some cases of reading them."""

    def __init__(self, cases: dict[str, Case]):
        super().__init__()
        n = WIDTH
        self.whole = nn.Parameter(torch.randn(3 * n, n))
        self.bias = nn.Parameter(torch.randn(3 * n))
        self.tied = self.whole
        self.images = nn.Parameter(torch.randn(8, 2, 3, 3))
        memory = torch.randn(3 * n * n)
        self.late = nn.Parameter(memory[n * n + 3 : 2 * n * n + 3].view(n, n))
        self.columns = nn.Parameter(memory.view(n, 3 * n)[:, n : 2 * n])
        self.turned = nn.Parameter(torch.randn(n, n + 4).t())
        self.gaps = nn.Parameter(torch.randn(2 * n, n)[1::2])
        self.register_buffer("row", torch.randn(4, n)[3:4].expand(n, n))
        self.cases = cases

    def forward(self, x: Tensor) -> list[Tensor]:
        """Computes each case."""
        return [case(self, x) for case in self.cases.values()]


FIRST: dict[str, Case] = {
    "last slice": lambda m, x: linear(x, m.whole[WIDTH:], m.bias[WIDTH:]),
    "chunk": lambda m, x: x @ m.whole.chunk(3)[1],
    "transposed slice": lambda m, x: x @ m.whole.t()[:, 5:40],
    "slice with offset": lambda m, x: linear(x, m.late[5:]),
    "gaps": lambda m, x: linear(x, m.gaps),
}
"""Of backends that take long to compile."""

CASES: dict[str, Case] = FIRST | {
    "first slice": lambda m, x: linear(x, m.whole[:WIDTH], m.bias[:WIDTH]),
    "columns": lambda m, x: linear(x[:, 4:], m.whole[:, 4:]),
    "tied slice": lambda m, x: linear(x, m.tied[2 * WIDTH :]),
    "offset": lambda m, x: linear(x, m.late),
    "transposed": lambda m, x: linear(x, m.turned[4:]),
    "whole": lambda m, x: linear(x, m.whole, m.bias),
    "split": lambda m, x: linear(x, m.whole.split([10, 8, 30])[1]),
    "every other": lambda m, x: linear(x, m.whole[1::2], m.bias[1::2]),
    "row": lambda m, x: layer_norm(x, (WIDTH,), m.whole[5], m.whole[20]),
    "item": lambda m, x: x + m.whole.unbind(0)[9] * m.bias[WIDTH],
    "as_strided": lambda m, x: linear(x, m.whole.as_strided((9, WIDTH), (2 * WIDTH, 1), 130)),
    "expanded": lambda m, x: x.unsqueeze(0) @ m.whole[WIDTH : 2 * WIDTH].expand(2, WIDTH, WIDTH),
    "heads": lambda m, x: torch.einsum("bk,hdk->bhd", x, m.whole.view(3, WIDTH, WIDTH)[1:]),
    "diagonal": lambda m, x: x[:, :13] * m.whole.diagonal(3)[:13],
    "columns of memory": lambda m, x: linear(x, m.columns[3:]),
    "expanded buffer": lambda m, x: linear(x, m.row[2:]),
    "filters": lambda m, x: conv2d(x.view(1, 2, 8, 8), m.images[4:]),
    "filters of memory": lambda m, x: conv2d(
        x.view(1, 2, 8, 8), m.whole.view(-1)[300 : 300 + 8 * 2 * 9].view(8, 2, 3, 3)
    ),
}


@dataclasses.dataclass
class Pair:
    """A module beside its twin in float64."""

    module: Weights
    twin: Weights

    @classmethod
    def of(cls, cases: dict[str, Case]) -> "Pair":
        """Makes a module with these cases, and its copy in float64."""
        module = Weights(cases).eval()
        return cls(module, copy.deepcopy(module).double())

    def change(self) -> None:
        """Changes weights of both."""
        for m in (self.module, self.twin):
            with torch.no_grad():
                m.whole.mul_(0.5)
                m.late.add_(1)
                m.gaps[3].zero_()
                m.turned.data.neg_()

    def before_and_after_a_change(self) -> Iterator[None]:
        """Yields before and after a change of the weights."""
        yield
        self.change()
        yield


def compare_frozen(compiled: Function, pair: Pair) -> None:
    """Compares results without gradients, before and after weights are changed.

    Args:
        compiled: The module, compiled.
        pair: The module and its twin.

    Raises:
        AssertionError: They are not eager's.
    """
    x = torch.randn(8, WIDTH)
    with torch.no_grad():
        for _ in pair.before_and_after_a_change():
            assert_same(pair.module(x), compiled(x), pair.twin(x.double()))


def compare_trained(compiled: Function, pair: Pair) -> None:
    """The same with gradients, which are compared, too."""
    x, (module, twin) = torch.randn(8, WIDTH), (pair.module, pair.twin)
    for _ in pair.before_and_after_a_change():
        found = _gradients(compiled, module, x)
        expected = _gradients(module, module, x)
        assert_same(expected, found, _gradients(twin, twin, x.double()))


def _gradients(function: Function, owner: Weights, x: Tensor) -> Any:
    owner.zero_grad()
    results = function(x)
    torch.stack([r.square().sum() for r in results]).sum().backward()
    return results, {
        name: p.grad.clone() for name, p in owner.named_parameters() if p.grad is not None
    }


@CHECKS.each({name: {name: case} for name, case in CASES.items()})
def views(subject: Subject, value: dict[str, Case]) -> None:
    """One view of a weight."""
    pair = Pair.of(value)
    compare_frozen(subject.compile(pair.module), pair)


@CHECKS.add
def views_in_training(subject: Subject) -> None:
    """Checks all views of one module, with gradients."""
    pair = Pair.of(CASES)
    compare_trained(subject.compile(pair.module), pair)
