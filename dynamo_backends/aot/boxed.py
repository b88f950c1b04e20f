"""One functional graph of AOT Autograd, compiled into what AOT Autograd calls."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends.aot.updates import writing_updates
from dynamo_backends.interface.errors import DoubleBackwardError
from dynamo_backends.interface.report import Kind

_NO_DOUBLE_BACKWARD = (
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
    raise DoubleBackwardError(_NO_DOUBLE_BACKWARD)


GraphCompiler = Callable[[fx.GraphModule, Kind, frozenset[int]], Callable[[list[Any]], Any]]
"""Makes a boxed callable (list in, sequence out) of a functional graph, given its kind and which of
Dynamo's inputs are parameters and buffers."""


def compile_boxed(
    compile_graph: GraphCompiler, gm: fx.GraphModule, kind: Kind, static: frozenset[int]
) -> Callable[[list[Any]], Sequence[Any]]:
    """Compiles a graph, which then writes to the inputs that it updates (see `updates`).

    A backward graph refuses to be differentiated.

    Args:
        compile_graph: The compiler.
        gm: The graph.
        kind: Which of AOT Autograd's graphs it is.
        static: Which of Dynamo's inputs are parameters and buffers.
    """
    with torch.no_grad():
        run = writing_updates(compile_graph(gm, kind, static), gm.graph)

    def boxed(args: list[Any]) -> Sequence[Any]:
        return run(args)

    def boxed_backward(args: list[Any]) -> Sequence[Any]:
        refuse_double_backward()
        return boxed(args)

    called = boxed_backward if kind == "backward" else boxed
    called._boxed_call = True  # type: ignore[attr-defined]
    return called
