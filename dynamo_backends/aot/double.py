"""Gradients of gradients, which compiled graphs do not have: a refusal that says what to do."""

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor

from dynamo_backends import _torch_private as private
from dynamo_backends.interface.errors import DoubleBackwardError

MESSAGE = (
    "a compiled graph has no gradients of gradients: torch.compile makes a forward and a backward "
    "graph, and the backward graph cannot be differentiated. Run what is differentiated twice (a "
    "gradient penalty, a Hessian product, torch.autograd.grad(..., create_graph=True)) in eager: "
    "call the module itself there instead of its compiled form, or decorate that function with "
    "torch.compiler.disable. The rest can stay compiled."
)


def refuse_double_backward() -> None:
    """Inside a compiled backward: whoever differentiates its results gets `DoubleBackwardError`."""
    node = private.running_backward()
    if node is None:
        return

    def watch(gradients: Sequence[Tensor | None], _: Any) -> None:
        handle.remove()
        for made in {g.grad_fn for g in gradients if g is not None and g.grad_fn is not None}:
            made.register_prehook(_refuse)

    handle = node.register_hook(watch)


def _refuse(_: Sequence[Tensor | None]) -> NoReturn:
    raise DoubleBackwardError(MESSAGE)
