"""Shows a function's graph before and after each stage of the middle end."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from dynamo_backends._torch_private import OpOverload, inline_regions
from dynamo_backends.aot.autograd import compile_functional
from dynamo_backends.graph.decomposition_tables import decomposition_table
from dynamo_backends.graph.graph import Graph, format_graph
from dynamo_backends.graph.normalize import NORMALIZE, NormalizedGraph, normalize
from dynamo_backends.graph.passes import DECOMPOSE, FUNCTIONALIZE, PASSES
from dynamo_backends.graph.properties import Pass
from dynamo_backends.graph.specialize import SPECIALIZE, is_dynamic, specialize
from dynamo_backends.interface.report import Kind

CAPTURE = "capture"


class StageText(NamedTuple):
    """The text of a graph after one stage, and whether the stage changed it.

    Attributes:
        name: Name of the stage; the first is "capture", what Dynamo hands over.
        text: The graph (see `text.format_graph`).
        changed: Whether the stage changed anything.
    """

    name: str
    text: str
    changed: bool


def normal_form(
    fn: Callable[..., Any],
    *args: Any,
    backend: str | None = None,
    dynamic: bool | None = None,
    **kwargs: Any,
) -> list[StageText]:
    """Runs a function once; returns its graph as text after every stage, in order.

    Gradients are treated as `fn(*args)` would treat them here: with `torch.no_grad()` the graphs
    are those of inference, in which parameters are frozen; else the forward graph is shown.

    Args:
        fn: Function or module that Dynamo captures whole. It is run once.
        args: Its arguments.
        backend: Whose composite operators stay whole; None: all are decomposed.
        dynamic: As for `torch.compile`.
        kwargs: More arguments.

    Raises:
        torch._dynamo.exc.Unsupported: Dynamo cannot capture the function as one graph.
        UnknownBackendError: There is no such backend.
    """
    recorder = _Recorder(_kept_by(backend))
    compiled = torch.compile(fn, backend=recorder, fullgraph=True, dynamic=dynamic)
    compiled(*args, **kwargs)
    return recorder.steps


def show_passes(
    fn: Callable[..., Any],
    *args: Any,
    backend: str | None = None,
    dynamic: bool | None = None,
    **kwargs: Any,
) -> None:
    """Prints a function's graph after each stage that changed it."""
    for name, text, changed in normal_form(fn, *args, backend=backend, dynamic=dynamic, **kwargs):
        print(f"# {name}" if changed else f"# {name}: changes nothing")
        if changed:
            print(text)
        print()


def _kept_by(backend: str | None) -> frozenset[OpOverload]:
    if backend is None:
        return frozenset()
    from dynamo_backends.interface.registry import get_backend

    found = get_backend(backend)
    return frozenset(found.preserved_operators(found.Options()))


class _Recorder:
    """A backend for `torch.compile` that runs graphs in eager and keeps their texts."""

    def __init__(self, keep: frozenset[OpOverload]):
        self.steps: list[StageText] = []
        self._keep = keep

    def __call__(self, captured: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        captured = inline_regions(captured)
        self.steps.clear()  # Dynamo may start over
        self._add(CAPTURE, format_graph(captured.graph))
        functional: list[str] = []

        def keep_text(gm: fx.GraphModule, *_: Any) -> Callable[[list[Any]], Sequence[Any]]:
            functional.append(format_graph(gm.graph))
            return lambda args: gm(*args)

        compile_functional(captured, inputs, keep_text, {})
        self._add(FUNCTIONALIZE.name, functional[0])
        return compile_functional(captured, inputs, self._compile, decomposition_table(self._keep))

    def _compile(
        self, gm: fx.GraphModule, kind: Kind, static: frozenset[int]
    ) -> Callable[[list[Any]], Sequence[Any]]:
        if kind == "backward":
            return lambda args: gm(*args)
        self._add(DECOMPOSE.name, format_graph(gm.graph))
        normalized = normalize(gm, kind, freeze=True, static=static)
        self._add(NORMALIZE.name, normalized.graph.text())

        def run(args: list[Any]) -> Sequence[Any]:
            full = [*args, *normalized.constants]
            args.clear()
            return self._finish(normalized, full)(*full)

        return run

    def _finish(self, normalized: NormalizedGraph, args: list[Any]) -> fx.GraphModule:
        graph = normalized.graph.copy()
        if is_dynamic(graph):
            graph = specialize(graph, args)
            self._add(SPECIALIZE, graph.text())
        PASSES(graph, self._after)
        return graph.module

    def _after(self, each: Pass, graph: Graph, changed: bool) -> None:
        self.steps.append(StageText(each.name, graph.text(), changed))

    def _add(self, name: str, text: str) -> None:
        changed = not self.steps or self.steps[-1].text != text
        self.steps.append(StageText(name, text, changed))
