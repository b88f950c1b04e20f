"""One functional graph of AOT Autograd, compiled into what AOT Autograd calls."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from dynamo_backends.aot.double import refuse_double_backward
from dynamo_backends.aot.updates import writing_updates
from dynamo_backends.interface.report import Kind

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
