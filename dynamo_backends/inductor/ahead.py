"""Compiles graphs by AOTInductor, to shared libraries that packages hold."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends._torch_private import SharedLibrary, settings_for_casts
from dynamo_backends.graph.aliasing import estimate_peak_bytes, find_view_base
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.symbolic_sizes import SizeWithExpression, sizes_of, with_sizes_as_inputs
from dynamo_backends.inductor.libraries import LibraryExecutable, Run, digest, parts_of
from dynamo_backends.inductor.runtime import (
    fake,
    inductor_lock,
    prepared_module,
    symbolic,
    symbols_of,
)
from dynamo_backends.interface.errors import CompileError, reraise_as_compile_error
from dynamo_backends.kernels.linears import multiply_by_onednn
from dynamo_backends.runtime.freed_memory import keep_freed_memory

aten = torch.ops.aten


class AheadExecutable(LibraryExecutable):
    """A graph that AOTInductor compiles, once for each set of frozen weights that is bound.

    Args:
        graph: For concrete shapes; tensors are on the CPU.
        settings: Settings of `torch._inductor.config`, for compiling.
        freezes: Whether weights are compiled in.
        reduced: Whether it may compute in bfloat16.
        reserve: Whether memory of temporaries is kept between calls.
        ranged: It is for all sizes that the symbols allow.

    Raises:
        CompileError: AOTInductor cannot compile the graph.
    """

    def __init__(
        self,
        graph: Graph,
        settings: Mapping[str, Any],
        freezes: bool,
        reduced: bool,
        reserve: bool = True,
        ranged: bool = False,
    ):
        super().__init__(graph, list(_foldable(graph)) if freezes else (), ranged)
        self._settings = dict(settings)
        self._reduced = reduced
        self._reserve = reserve
        self._graph = with_sizes_as_inputs(graph)[0] if ranged else graph
        self._weights = len(graph.weights)
        self._libraries: list[tuple[list[str], SharedLibrary]] = []
        self._parts: dict[str, bytes] = {}
        if ranged:  # weights are compiled in later, when it is too late to do without symbols
            symbols_of(_tensors(self._graph.placeholders))
        if not self._frozen:
            self._compile(())

    def dump(self) -> dict[str, bytes]:
        """See `Executable.dump`. The dict gets what is compiled later, when weights are bound."""
        return self._parts

    def _program(self, weights: Sequence[Tensor]) -> Run:
        digests = list(map(digest, weights))
        known = (run for of, run in self._programs if of == digests)
        return next(known, None) or self._compile(weights)

    def _compile(self, weights: Sequence[Tensor]) -> Run:
        constants: list[Tensor | None] = [None] * self._weights
        for i, weight in zip(self._frozen, weights, strict=True):
            constants[i] = weight
        with (
            inductor_lock,
            private.disable_current_modes(),
            warnings.catch_warnings(),
            reraise_as_compile_error("AOTInductor cannot compile it"),
        ):
            # Said by Inductor's tuner, and where torch copies the graphs that it makes itself.
            warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec", FutureWarning)
            module, _ = prepared_module(self._graph, constants if weights else (), self._reduced)
            library = self._library(module, bool(weights))
            temporaries = estimate_peak_bytes(module.graph)
            digests = list(map(digest, weights))
            self.add(digests, library)
        self._libraries.append((digests, library))
        self._parts.update(parts_of(self._libraries, self._frozen, self.serves_range, temporaries))
        if self._reserve:
            keep_freed_memory(temporaries)
        return self._programs[-1][1]

    def _library(self, module: fx.GraphModule, freezing: bool) -> SharedLibrary:
        settings = {**self._settings, "freezing": freezing}
        if not self._reduced:
            settings |= settings_for_casts(self._graph.module.graph)
        if freezing:
            multiply_by_onednn(module, ranged=self.serves_range)
        _copy_results(module.graph)
        if not self.serves_range:
            mode = private.mode_for_inductor()
            places = module.graph.find_nodes(op="placeholder")
            module.recompile()
            return private.compile_ahead(module, [fake(_plain(p), mode) for p in places], settings)
        symbols = symbols_of(_tensors(module.graph.find_nodes(op="placeholder")))
        _read_sizes(module.graph)
        module.recompile()
        places = module.graph.find_nodes(op="placeholder")
        fresh = private.FreshSymbols(
            {symbol: int(size) for symbol, size in symbols.items()},
            {symbol: (max(2, size.lower), size.upper) for symbol, size in symbols.items()},
        )
        library = private.compile_ahead(module, [symbolic(p, fresh) for p in places], settings)
        assumed = sympy.And(*fresh.guards)
        if assumed is not sympy.true:
            raise CompileError(f"its code is right only where {assumed}")
        return library


def _foldable(graph: Graph) -> Iterator[int]:
    """Yields the positions of weights that Inductor may fold or pack: all but look-up tables."""
    places = graph.placeholders
    for position, place in enumerate(graph.weights):
        node = places[place]
        looked_up = [u.target is aten.embedding.default and u.args[0] is node for u in node.users]
        if not all(looked_up):
            yield position


def _tensors(places: Sequence[fx.Node]) -> list[fx.Node]:
    return [place for place in places if isinstance(place.meta["val"], Tensor)]


def _plain(place: fx.Node) -> Any:
    """Returns what an input is once it is computed: lazily conjugated ones are, before a call."""
    value = place.meta["val"]
    if isinstance(value, Tensor) and value.is_conj():
        return aten._conj.default(value)
    return value


def _copy_results(graph: fx.Graph) -> None:
    """Copies outputs that are inputs, weights, or views of these: a library has its own memory."""
    output = graph.output_node()
    results: Any = output.args[0]
    copied = []
    for result in results:
        if isinstance(result, fx.Node) and find_view_base(result).op != "call_function":
            with graph.inserting_before(output):
                copy = graph.call_function(aten.clone.default, (result,))
            copy.meta = dict(result.meta)
            result = copy
        copied.append(result)
    output.args = (tuple(copied),)


def _read_sizes(graph: fx.Graph) -> None:
    """Reads sizes from the shapes of tensors in place of inputs: a library has tensors alone.

    Raises:
        CompileError: A size is no function of those of tensors.
    """
    places = graph.find_nodes(op="placeholder")
    sources: dict[sympy.Expr, tuple[fx.Node, int]] = {}
    for place in _tensors(places):
        for dim, size in enumerate(sizes_of(place)):
            if isinstance(size, SizeWithExpression):
                sources.setdefault(size.expression, (place, dim))
    first = next(node for node in graph.nodes if node.op != "placeholder")
    for place in places:
        size = place.meta["val"]
        if isinstance(size, Tensor):
            continue
        if (
            not isinstance(size, SizeWithExpression)
            or not size.expression.free_symbols <= sources.keys()
        ):
            raise CompileError(f"the number {place.name!r} is not read from a tensor's shape")
        with graph.inserting_before(first):
            node = _size_node(graph, size, sources)
        node.meta["val"] = size
        place.replace_all_uses_with(node)
        graph.erase_node(place)


def _size_node(
    graph: fx.Graph, size: SizeWithExpression, sources: Mapping[sympy.Expr, tuple[fx.Node, int]]
) -> fx.Node:
    expression = size.expression
    if expression in sources:
        return graph.call_function(aten.sym_size.int, sources[expression])
    known = {
        symbol: graph.call_function(aten.sym_size.int, sources[symbol])
        for symbol in sorted(expression.free_symbols, key=str)
    }
    return private.compute_size(expression, known)
