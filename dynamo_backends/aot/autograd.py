"""The only caller of AOT Autograd.

AOT Autograd turns what Dynamo captured into functional graphs: one for inference, or one forward
and one (lazily compiled) backward graph. It deals with mutated inputs, views and aliases, and
restores them around the compiled graphs.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from dynamo_backends import _torch_private as private
from dynamo_backends.aot.equal_layers import depends_on_gradients, mark_equal_layers
from dynamo_backends.aot.partition import partition_with
from dynamo_backends.aot.recurrent import has_network, recurrent_as_in_eager
from dynamo_backends.aot.serialized import (
    GraphCompiler,
    compile_boxed,
    compile_cacheable,
    pickled_if_kept,
)
from dynamo_backends.aot.traces import Traces
from dynamo_backends.graph import lstm
from dynamo_backends.interface.errors import brief_error
from dynamo_backends.interface.report import Kind

log = logging.getLogger("dynamo_backends")


def compile_functional(
    captured: fx.GraphModule,
    example_inputs: Sequence[Any],
    compile_graph: GraphCompiler,
    decompositions: dict[Any, Callable[..., Any]],
    partitioner: str = "default",
    complete: bool = True,
    traces: Traces | None = None,
    marked: fx.GraphModule | None = None,
) -> Callable[..., Any]:
    """Splits a captured graph and compiles each functional graph of it.

    Args:
        captured: Dynamo's torch-level graph.
        example_inputs: Dynamo's inputs, real tensors.
        compile_graph: Makes a boxed callable (list in, sequence out) of one functional graph.
        decompositions: Applied while tracing.
        partitioner: How forward and backward are told apart: "default" or "min_cut" (see
            `Options.partitioner`). Where `torch.utils.checkpoint` was used, both rematerialize
            what it names.
        complete: Whether Dynamo gets the result as it is, so that torch may keep it for other
            processes.
        traces: Where the functional graph is kept for other processes; None: nowhere.
        marked: The captured graph with calls of regions, if it calls any. AOT Autograd traces each
            region, or one of several equal layers, once where the functional graph is the same.

    Returns:
        What Dynamo calls in place of the captured graph.
    """
    pickled = pickled_if_kept(compile_graph, complete)
    shortens = pickled is None and not private.is_autocast_on()
    if traces is not None and shortens and (kept := traces.load()) is not None:
        return _without_aot(compile_boxed(compile_graph, kept[0], "inference", kept[1]))
    compilation = _Compilation(captured, example_inputs, compile_graph, pickled, shortens, traces)

    def trace(graph: fx.GraphModule) -> Callable[..., Any]:
        backend = private.aot_autograd(
            fw_compiler=compilation.compiler_of(graph, "forward"),
            bw_compiler=compilation.compiler_of(graph, "backward"),
            inference_compiler=compilation.compiler_of(graph, "inference"),
            decompositions={**decompositions, **lstm.DECOMPOSITIONS},
            partition_fn=partition_with(partitioner),
        )
        with (
            private.tagging_cache_key(pickled),
            private.keeping_unused_draws(),
            recurrent_as_in_eager(captured),
        ):
            return backend(graph, example_inputs)

    keeps_traces = traces is not None and traces.are_kept and shortens
    if not (keeps_traces and _may_have_regions(captured, example_inputs)):
        marked = captured
    elif marked is None or marked is captured:
        marked = mark_equal_layers(captured)
    try:
        called = trace(marked)
    except Exception as error:  # torch cannot trace the operator, or cannot compile what it traced
        if compilation.has_begun or marked is captured:
            raise
        log.debug("each call of a region is traced: %s", brief_error(error))
        called = trace(captured)
    if private.must_be_serializable():
        called = private.wrap_for_aot_compile(called)
    sufficient = compilation.sufficient
    return called if sufficient is None else _shortened(called, *sufficient)


class _Compilation:
    """Compiles the functional graphs that AOT Autograd makes of one captured graph.

    Attributes:
        has_begun: Whether it has compiled one; another trace would compile it again.
        sufficient: The compiled inference graph, and how many of its results are updated inputs,
            if AOT Autograd does nothing at a call besides running it.
    """

    def __init__(
        self,
        captured: fx.GraphModule,
        example_inputs: Sequence[Any],
        compile_graph: GraphCompiler,
        pickled: bytes | None,
        shortens: bool,
        traces: Traces | None,
    ):
        self._captured = captured
        self._inputs = len(example_inputs)
        self._compile_graph = compile_graph
        self._pickled = pickled
        self._shortens = shortens
        self._traces = traces
        self.has_begun = False
        self.sufficient: tuple[Callable[[list[Any]], Any], int] | None = None

    def compiler_of(self, traced: fx.GraphModule, kind: Kind) -> Callable[..., Any]:
        """Returns a compiler for AOT Autograd.

        Args:
            traced: What is traced: the captured graph, or a copy with calls of regions.
            kind: Of the functional graphs.
        """

        def compile_kind(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], Any]:
            if traced is not self._captured:
                gm = _without_regions(gm, kind)
            return self._compile(gm, kind)

        if self._pickled is None:
            return compile_kind
        return private.wrap_serializable_compiler(compile_kind)

    def _compile(self, gm: fx.GraphModule, kind: Kind) -> Callable[[list[Any]], Any]:
        self.has_begun = True
        private.clear_donated_buffers()
        static = frozenset(private.static_input_indices(self._captured, gm.graph))
        if kind == "inference":
            private.annotate_input_mutations(gm)
        updates = len(private.annotated_input_mutations(gm.graph))
        suffices = kind == "inference" and private.needs_no_runtime_wrapper(self._inputs, updates)
        if self._traces is not None and self._shortens and suffices and not updates:
            self._traces.save(gm, static)
        compile_one = compile_boxed if self._pickled is None else compile_cacheable
        run = compile_one(self._compile_graph, gm, kind, static)
        if self._shortens and suffices and self.sufficient is None:
            self.sufficient = run, updates
        return run


def _may_have_regions(captured: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Returns whether a graph is for inference, and in a region is traced as outside of one."""
    differentiated = torch.is_grad_enabled() and any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in inputs
    )
    return not (differentiated or has_network(captured) or depends_on_gradients(captured))


class _RegionError(Exception):
    """Regions cannot be inlined in a functional graph."""


def _without_regions(gm: fx.GraphModule, kind: Kind) -> fx.GraphModule:
    """Returns an inference graph with its regions inlined.

    Raises:
        _RegionError: A region updates its inputs, or gradients are computed of it. AOT Autograd
            calls such a region by operators of its own.
    """
    inlined = private.inline_regions(gm)
    if kind != "inference" or private.calls_graphs(inlined.graph):
        raise _RegionError(f"the {kind} graph calls graphs")
    return inlined


def _shortened(
    called: Callable[..., Any], graph: Callable[[list[Any]], Any], updates: int
) -> Callable[..., Any]:
    """Returns what AOT Autograd made, without its way to the graph where that does nothing.

    Args:
        called: What it made. The first call is left to it, for it then looks for user-defined
            operators whose results share memory with their arguments.
        graph: The boxed inference graph in it.
        updates: Number of its first results that are updated inputs.
    """
    first = True
    rest = slice(updates, None)
    later = _without_aot(graph)

    def call(*args: Any) -> Any:
        nonlocal first
        if first:
            first = False
            return called(*args)
        return later(*args)[rest]

    return call


def _without_aot(graph: Callable[[list[Any]], Any]) -> Callable[..., Any]:
    """Returns what Dynamo calls where the graph is all of a call."""

    def call(*args: Any) -> Any:
        if torch.is_grad_enabled():
            with torch.no_grad():
                return graph(list(args))
        return graph(list(args))

    return call
