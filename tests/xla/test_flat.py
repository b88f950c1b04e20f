"""What a step updates, in one dimension."""

from typing import Any

import jax
import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends.xla.lowering.context import LoweringOptions
from dynamo_backends.xla.lowering.interpreter import GraphLowering
from dynamo_backends.xla.lowering.values import Flat, to_logical_array
from tests.aot.step_checks import assert_one_program
from tests.xla.harness import capture

ORDERS = {"row-major": (0, 1, 2, 3), "channels last": (0, 2, 3, 1), "reversed": (3, 2, 1, 0)}


def momentum(weight: Tensor, average: Tensor, gradient: Tensor, rate: Tensor) -> list[Tensor]:
    average = torch.lerp(average, gradient, 0.1)
    return [weight - rate * average / (gradient.square().sqrt() + 1e-8), average]


def in_memory(tensor: Tensor, order: tuple[int, ...]) -> Flat:
    array = jax.numpy.asarray(tensor.permute(order).reshape(-1).numpy())
    return Flat(array, tuple(tensor.shape), order)


def lower(function: Any, *tensors: Tensor, flat: dict[int, tuple[int, ...]]) -> list[Any]:
    """Results of a lowered function, some of whose inputs come in one dimension."""
    graph, inputs = capture(function, *tensors)
    values = [
        in_memory(x, flat[i]) if i in flat else jax.numpy.asarray(x.numpy())
        for i, x in enumerate(inputs)
    ]
    return GraphLowering(graph.graph, LoweringOptions())(values)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_updates_stay_in_one_dimension(order: tuple[int, ...]) -> None:
    weight, average, gradient = torch.randn(3, 5, 4, 3, 2).unbind()
    rate = torch.tensor(0.5)
    results = lower(momentum, weight, average, gradient, rate, flat={0: order, 1: order})
    for result, expected in zip(results, momentum(weight, average, gradient, rate), strict=True):
        assert isinstance(result, Flat)
        assert result.order == order
        torch.testing.assert_close(torch.tensor(to_logical_array(result).tolist()), expected)


def test_orders_that_differ_meet_in_the_first() -> None:
    a, b = torch.randn(2, 5, 4, 3, 2).unbind()
    (result,) = lower(torch.add, a, b, flat={0: (3, 2, 1, 0), 1: (0, 2, 3, 1)})
    assert isinstance(result, Flat)
    torch.testing.assert_close(torch.tensor(to_logical_array(result).tolist()), a + b)


@pytest.mark.parametrize("other", [(1, 4), (3, 5, 4)], ids=["smaller", "larger"])
def test_operands_that_are_broadcast_have_their_dimensions(other: tuple[int, ...]) -> None:
    a, b = torch.randn(5, 4), torch.randn(other)
    (result,) = lower(torch.mul, a, b, flat={0: (0, 1)})
    torch.testing.assert_close(torch.tensor(result.tolist()), a * b)


def test_other_operators_get_all_dimensions() -> None:
    a, b = torch.randn(5, 4), torch.randn(4, 3)
    (result,) = lower(lambda a, b: (a + 1) @ b, a, b, flat={0: (1, 0), 1: (0, 1)})
    torch.testing.assert_close(torch.tensor(result.tolist()), (a + 1) @ b)


def test_elements_that_are_missing_are_noticed() -> None:
    text = r"shape \(6,\) does not have the 8 elements of shape \(2, 4\)"
    with pytest.raises(ValueError, match=text):
        Flat(jax.numpy.zeros(6), (2, 4), (0, 1))


def test_a_step_keeps_the_layout_of_what_it_updates() -> None:
    """Parameters that are channels last, transposed, scalars, shared, or without elements."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
            self.matrix = nn.Parameter(torch.randn(6, 8).T)
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.nothing = nn.Parameter(torch.zeros(0, 3))
            self.shared = nn.Parameter(torch.randn(6, 4))

        def forward(self, x: Tensor) -> Tensor:
            features = self.convolution(x).relu().mean((2, 3)) @ self.matrix
            return (features @ self.shared) * self.scale + self.nothing.sum()

    def train(compiled: bool) -> nn.Module:
        torch.manual_seed(0)
        model = Net().double()
        model.view = model.shared.detach()[1:]  # so its memory cannot be XLA's
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run: Any = step
        if compiled:
            run = dynamo_backends.compile_step(
                step, model=model, optimizer=optimizer, backend="openxla"
            )
        for seed in range(4):
            torch.manual_seed(seed)
            run(torch.randn(2, 3, 7, 7, dtype=torch.float64))
        assert torch.equal(model.view, model.shared[1:])
        if compiled:
            assert_one_program(run, 4)
        return model

    expected, model = train(compiled=False), train(compiled=True)
    for (name, value), found in zip(expected.named_parameters(), model.parameters(), strict=True):
        assert found.stride() == value.stride(), name
        torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-12)
