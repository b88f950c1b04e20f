"""Checks mutation, aliases and layouts."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dynamo_backends.conformance.comparing import assert_close, ensure
from dynamo_backends.conformance.registering import Table
from dynamo_backends.conformance.subject import Subject

CHECKS = Table()


@CHECKS.add
def operators_in_place_change_the_callers_tensors(subject: Subject) -> None:
    """Checks that mutated inputs are the caller's."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1).mul_(y)
        y[0] = 5
        return x + y

    with torch.no_grad():
        subject.check(fn, torch.randn(3, 4), torch.randn(3, 4))


@CHECKS.add
def results_without_elements_can_be_resized(subject: Subject) -> None:
    """An out= argument that has to grow."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.empty(0)
        torch.add(x, 1, out=y)  # the graph ends before it
        return y, y * 2

    subject.check(fn, torch.randn(4, 6), fullgraph=False)
    result = subject.compile(lambda x: (x[:, :0] + 1).t())(torch.randn(4, 6))
    ensure(result.shape == (0, 4), f"the shape is {tuple(result.shape)} instead of (0, 4)")
    right = torch.equal(torch.mul(torch.ones(3), 2, out=result), torch.full((3,), 2.0))
    ensure(right, "a result without elements cannot be resized")


@CHECKS.add
def in_place_on_a_view_of_an_input(subject: Subject) -> None:
    """A mutated part of an input."""

    def fn(x: Tensor) -> Tensor:
        x[:, 1:3].sigmoid_()
        return x * 2

    subject.check(fn, torch.randn(4, 6))


@CHECKS.add
def two_inputs_that_share_memory(subject: Subject) -> None:
    """One input is mutated, and the other one sees it."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return y * 3

    base = torch.arange(12.0)
    a, b = base.clone(), base.clone()
    result = subject.compile(fn)(a[:8], a[4:])
    ensure(torch.equal(result, fn(b[:8], b[4:])), "the other input does not see the change")
    ensure(torch.equal(a, b), "the memory of the inputs is not what eager makes of it")


@CHECKS.add
def outputs_that_are_views_of_inputs_and_of_each_other(subject: Subject) -> None:
    """Checks aliases of outputs and inputs."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        return x.t(), x[1:], y, y.view(-1), y.t(), x

    subject.check(fn, torch.randn(4, 6))


@CHECKS.add
def an_input_returned_as_it_is(subject: Subject) -> None:
    """Checks that a returned input is the same object."""
    x = torch.randn(3)
    ensure(subject.compile(lambda x: (x, x + 1))(x)[0] is x, "another tensor is returned")


@CHECKS.add
def results_are_the_callers(subject: Subject) -> None:
    """A later call, or a changed input, leaves earlier results alone."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return (x + 1) * 3, (x - 3).abs().sum(), x.t() * 2

    compiled, kept = subject.compile(fn), []
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(5, 4)
            kept.append((compiled(x), fn(x)))
            x.zero_()
    for found, expected in kept:
        assert_close(found, expected)


@CHECKS.each(
    {
        "expanded": lambda: torch.randn(3, 1).expand(3, 5),
        "strided": lambda: torch.randn(8, 10)[::2, 1::3],
        "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "transposed": lambda: torch.randn(4, 6).t(),
        "permuted": lambda: torch.randn(2, 3, 4).permute(2, 0, 1),
        "empty": lambda: torch.randn(0, 4),
        "0-d": lambda: torch.tensor(3.0),
        "misaligned": lambda: torch.randn(9)[1:],
        "conj": lambda: torch.randn(5, dtype=torch.complex64).conj(),
        "neg": lambda: torch.randn(5, dtype=torch.complex64).conj().imag,
    }
)
def unusual_inputs(subject: Subject, value: Any) -> None:
    """Layouts of inputs, and bits of tensors."""
    subject.check(lambda x: (x * 2 + 1, x.sum(), x.exp()), value())


@CHECKS.add
def inputs_whose_layout_changes_between_calls(subject: Subject) -> None:
    """The same shape, other strides."""
    compiled = subject.compile(lambda x: x * 2 + x.sum(0))
    x = torch.randn(6, 6)
    for y in (x, x.t(), x.expand(6, 6), torch.randn(12, 12)[::2, ::2], x.t().contiguous()):
        assert_close(compiled(y), y * 2 + y.sum(0))


@CHECKS.add
def channels_last_models_keep_their_layout(subject: Subject) -> None:
    """Checks strides of results."""
    module: Any = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2)).eval()
    module = module.to(memory_format=torch.channels_last)
    with torch.no_grad():
        subject.check(module, torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last))


@CHECKS.add
def expanded_and_strided_outputs(subject: Subject) -> None:
    """Checks strides of results."""
    subject.check(
        lambda x: ((x + 1).expand(4, 3), (x + 1).view(1, 3, 1).expand(2, 3, 5)), torch.randn(3)
    )
    subject.check(lambda x: (x + 1)[::2], torch.randn(6, 3))


class Pair(NamedTuple):
    """A model with nested outputs."""

    first: Tensor
    rest: dict[str, Any]


@CHECKS.add
def none_and_nested_outputs(subject: Subject) -> None:
    """The structure of results."""

    def fn(x: Tensor) -> Pair:
        return Pair(x + 1, {"none": None, "list": [x * 2, (x - 1, 7)], "text": "a"})

    subject.check(fn, torch.randn(3))
