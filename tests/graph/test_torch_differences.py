"""What the random programs leave out because torch itself differs from eager there, without us.

Each is shown with torch's own `aot_eager`. When one of these fails, torch was mended: then the
random programs need not leave it out any longer (docs/graph.md, "Where torch itself differs").
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from dynamo_backends.aot.autograd import compile_functional
from tests.graph.programs import Call, Input, Program, Ref

MENDED = torch.__version__ >= "2.14"
Made = Callable[[], list[Tensor]]
Computed = Callable[..., tuple[Tensor, ...]]


def write_through_expanded(x: Tensor) -> tuple[Tensor, ...]:
    base = x * 1e8
    base.expand(3, 4)[2].copy_(x * 1e-8)
    return (base + 0,)


def fill_where_masked(x: Tensor) -> tuple[Tensor, ...]:
    return (x.clone().masked_fill_(x > 2, 1),)


def drop_nothing(x: Tensor) -> tuple[Tensor, ...]:
    y = torch.nn.functional.dropout(x, 0.0, True)
    y.add_(1)
    return (x + 0,)


def write_and_transpose(x: Tensor) -> tuple[Tensor, ...]:
    return (x.add_(1).transpose_(0, 1),)


def row() -> list[Tensor]:
    return [torch.tensor([0.1, 0.7, 1e-9, 3.3])]


def transposed() -> list[Tensor]:
    return [torch.arange(6.0).view(2, 3).t()]


def with_gaps() -> list[Tensor]:
    return [torch.arange(12.0).view(2, 6)[:, ::2]]


@pytest.mark.parametrize(
    ("function", "make_inputs", "equal", "same_strides"),
    [
        pytest.param(write_through_expanded, row, False, True, id="write-through-expanded"),
        pytest.param(drop_nothing, row, MENDED, True, id="dropout-of-nothing"),
        pytest.param(fill_where_masked, transposed, True, False, id="masked_fill_"),
        pytest.param(write_and_transpose, with_gaps, True, False, id="transpose_-with-gaps"),
    ],
)
def test_torch_itself_differs(
    function: Computed, make_inputs: Made, equal: bool, same_strides: bool
):
    torch._dynamo.reset()
    (expected,) = function(*make_inputs())
    (result,) = torch.compile(function, backend="aot_eager")(*make_inputs())
    assert torch.equal(result, expected) == equal
    assert (result.stride() == expected.stride()) == same_strides


@torch.no_grad()
def test_aot_autograd_itself_fails_for_inputs_that_share_memory_with_an_offset():
    inputs = [Input("x0", (3, 1), torch.float64, "offset"), Input("x1", of="x0")]
    calls = [
        Call("v0", "reshape", (Ref("x0"), (1, 3))),
        Call("v1", "operator.setitem", (Ref("v0"), slice(0, 1), 0)),
        Call("v2", "add", (Ref("x1"), 1)),
    ]
    program = Program(inputs, calls, [Ref("v0"), Ref("v2")])
    values = program.make_inputs()
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        compile_functional(program.module(), values, _as_it_is, {})(*values)


def _as_it_is(gm: fx.GraphModule, *_: Any) -> Callable[[list[Any]], Any]:
    return lambda args: gm(*args)
