"""Calls of changing sizes: what was compiled for some serves others, or is not used for them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dynamo_backends.conformance.comparing import assert_same, ensure
from dynamo_backends.conformance.registering import Table
from dynamo_backends.conformance.subject import (
    Function,
    Subject,
    float64_copy,
    gradients,
    reference,
)

CHECKS = Table()

RECOMPILATIONS = 64
"""Number of compilations of a function after which Dynamo runs it in eager."""


def halves(x: Tensor) -> Tensor:
    """Adds the two halves of each row."""
    return x.view(x.shape[0], 2, -1).relu().sum(1)


SIZES = ((3, 8), (5, 12), (4, 6), (9, 2), (2, 2), (64, 10), (2, 40), (7, 7 * 2))
"""Of the inputs of `FUNCTIONS`: an even number of columns."""

FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "halves": halves,
    "positions": lambda x: x + torch.arange(x.shape[1]) / 2,
    "last": lambda x: (x[:, -1], x[1:] * 2),
    "merged": lambda x: (x.reshape(-1) * 2).view(x.shape[1], x.shape[0]),
    "channels": lambda x: x.t().contiguous().t() + 1,
    "expanded": lambda x: x.sum(0, keepdim=True).expand(x.shape[0] * 2, -1) * 1,
    "padded": lambda x: torch.nn.functional.pad(x, (1, x.shape[0])) + 1,
    "joined": lambda x: torch.cat([x, x.new_ones(3, x.shape[1])]).cumsum(0),
    "scaled": lambda x: x.sum(0) / x.shape[0],
    "two results and a number": lambda x: (*x.max(1), x.shape[0] * x.shape[1]),
    "factor": lambda x: x * (1.0 / (x.shape[0] // 4 + 1)),
    "a ratio beside it": lambda x: (x * 2, x.shape[0] / (x.shape[1] + 1)),
    "filled": lambda x: x[:2] + torch.full((2, 1), x.shape[0] / 4),
    "half": lambda x: x.to(torch.int64)[: x.shape[0] // 2 + 1] + x.shape[1] % 3,
}


def agree(result: Any, expected: Any) -> None:
    """Compares nested results without a reference.

    Raises:
        AssertionError: Values or strides are not the same.
    """
    torch.testing.assert_close(result, expected, equal_nan=True)
    for r, e in zip(*map(pytree.tree_leaves, (result, expected)), strict=True):
        if isinstance(e, Tensor):
            ensure(r.stride() == e.stride(), f"strides {r.stride()} instead of {e.stride()}")


class Reader(nn.Module):
    """Text in, with attention, and classes of it out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.projection = nn.Linear(16, 48)
        self.norm = nn.LayerNorm(16)
        self.bias = nn.Parameter(torch.randn(1, 16))
        self.head = nn.Linear(16, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns scores of classes."""
        x = self.embedding(tokens)
        batch, length, width = x.shape
        # Depends on weights and a size alone, and is no view.
        x = x + (self.bias * 2).expand(length, width).exp()
        parts = self.projection(x).view(batch, length, 3, 4, 4).permute(2, 0, 3, 1, 4)
        scores = (parts[0] @ parts[1].transpose(-2, -1) / 2).softmax(-1)
        x = x + (scores @ parts[2]).transpose(1, 2).reshape(batch, length, width)
        return self.head(self.norm(x)[:, -1])


class Seer(nn.Module):
    """A small image classifier with convolutions and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, image: Tensor) -> Tensor:
        """Scores of classes."""
        return self.head(self.body(image).flatten(2).mean(-1))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[Tensor]]]] = {
    "reader": (
        Reader,
        lambda: [torch.randint(50, s) for s in ((2, 5), (4, 64), (7, 2), (4, 5), (64, 3))],
    ),
    "seer": (
        Seer,
        lambda: [torch.randn(n, 3, s, s) for n, s in ((2, 8), (5, 12), (3, 16), (64, 6))],
    ),
}
"""How a model is made, and inputs of several sizes."""


HOW: dict[str, bool | None] = {"dynamic": True, "automatic": None}
"""Values of `torch.compile`'s `dynamic`."""


@CHECKS.each({f"{name}, {how}": (name, how) for name in FUNCTIONS for how in HOW})
def a_function(subject: Subject, value: tuple[str, str]) -> None:
    """A function of inputs of eight sizes."""
    name, how = value
    function = FUNCTIONS[name]
    _each_size(subject, function, [torch.randn(size) for size in SIZES], HOW[how])


def _each_size(
    subject: Subject, function: Function, inputs: list[Tensor], dynamic: bool | None
) -> None:
    with torch._dynamo.config.patch(recompile_limit=RECOMPILATIONS), torch.no_grad():
        compiled = subject.compile(function, dynamic=dynamic)
        for x in inputs:
            expected = function(x)
            try:
                assert_same(expected, compiled(x), reference(function, (x,), expected))
            except AssertionError as error:
                raise AssertionError(f"size {tuple(x.shape)}: {error}") from error


@CHECKS.each({f"{name}, {how}": (name, how) for name in MODELS for how in HOW})
def check_model_at_several_sizes(subject: Subject, value: tuple[str, str]) -> None:
    """Checks that a model gives eager's results on inputs of several sizes, up and down."""
    name, how = value
    make, inputs = MODELS[name]
    given = inputs()
    _each_size(subject, make().eval(), [*given, *reversed(given)], HOW[how])


@CHECKS.each({name: name for name in MODELS})
def gradients_of_a_model(subject: Subject, value: str) -> None:
    """Gradients at several sizes."""
    make, inputs = MODELS[value]
    module = make()
    wide = float64_copy(module)
    with torch._dynamo.config.patch(recompile_limit=RECOMPILATIONS):
        compiled = subject.compile(module, dynamic=True)
        for x in inputs():
            state = {k: v.clone() for k, v in module.state_dict().items()}
            ours = gradients(compiled, module, (x,))
            module.load_state_dict(state)
            theirs = gradients(module, module, (x,))
            precise = gradients(wide, wide, (x.double() if x.is_floating_point() else x,))
            assert_same(theirs, ours, precise, "gradient")


@CHECKS.add
def weights_that_change_between_sizes(subject: Subject) -> None:
    """New sizes and new weights in turn."""
    module = Reader().eval()
    compiled = subject.compile(module, dynamic=True)
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=RECOMPILATIONS):
        for x in MODELS["reader"][1]():
            for _ in range(2):
                assert_same(module(x), compiled(x), float64_copy(module)(x))
                module.bias.add_(0.5)
                module.head.weight.mul_(-0.5)


@CHECKS.add
def sizes_of_one_and_none(subject: Subject) -> None:
    """Sizes that Dynamo specializes on: 1, and 0."""
    _each_size(
        subject,
        lambda x: (x.exp() * 2, x.sum(0), torch.cat([x, x])),
        [torch.randn(n, 4) for n in (3, 1, 0, 5, 1, 2)],
        True,
    )


@CHECKS.add
def results_of_each_size_are_the_callers(subject: Subject) -> None:
    """A later call of another size leaves earlier results alone."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        return x + 1, x.view(-1), x.sum(0)

    compiled, kept = subject.compile(fn, dynamic=True), []
    with torch.no_grad():
        for size in (*SIZES, *SIZES):
            x = torch.randn(size)
            kept.append((compiled(x), [y.clone() for y in fn(x)]))
    for found, expected in kept:
        agree(found, tuple(expected))
