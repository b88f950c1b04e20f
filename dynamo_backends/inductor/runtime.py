"""Graphs compiled by Inductor, with weights as constants, for one size or a range."""

import copy
import logging
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends._torch_private import (
    FakeTensorMode,
    compile_decomposed_with_inductor,
    compile_frozen_with_inductor,
    disable_current_modes,
    mode_for_inductor,
    settings_for_casts,
)
from dynamo_backends._torch_private.forks import fork_safe_lock, fork_safe_rlock
from dynamo_backends.graph.aliasing import estimate_peak_bytes, find_view_base
from dynamo_backends.graph.graph import Graph, copy_graph
from dynamo_backends.graph.layouts import empty_strided_like
from dynamo_backends.graph.symbolic_sizes import (
    SIZE_FUNCTIONS,
    SizeReader,
    SizeWithExpression,
    sizes_of,
    strides_of,
)
from dynamo_backends.inductor.decompositions import decompose_for_inductor, widen_narrow_integers
from dynamo_backends.inductor.layouts import make_channels_last, make_weights_dense
from dynamo_backends.inductor.reduced import compute_in_bfloat16
from dynamo_backends.interface.errors import CompileError, brief_error
from dynamo_backends.interface.executable import Bound
from dynamo_backends.kernels import background_builds
from dynamo_backends.kernels.linears import multiply_by_onednn
from dynamo_backends.kernels.skinny_gemm import use_skinny_gemm
from dynamo_backends.kernels.small_channels import use_small_channels
from dynamo_backends.kernels.winograd import use_winograd
from dynamo_backends.runtime.cache import LRU
from dynamo_backends.runtime.freed_memory import keep_freed_memory
from dynamo_backends.runtime.prepared_executables import (
    PreparedExecutable,
    Run,
    wrap_for_lazy_inputs,
)
from dynamo_backends.runtime.ranged_calls import RangedCalls

log = logging.getLogger("dynamo_backends")

inductor_lock = fork_safe_rlock()  # Inductor is compiled with by one thread at a time


class InductorExecutable(PreparedExecutable):
    """A graph compiled by Inductor.

    Args:
        graph: For concrete shapes.
        settings: Settings of `torch._inductor.config`, for compiling.
        reduced: Whether it may compute in bfloat16.
        reserve: Whether memory of temporaries is kept between calls.
        ranged: It is for all sizes that the symbols allow.
    """

    def __init__(
        self,
        graph: Graph,
        settings: Mapping[str, Any],
        reduced: bool,
        reserve: bool = True,
        ranged: bool = False,
    ):
        self._settings = dict(settings)
        self._reduced = reduced
        self._reserve = reserve
        calls = RangedCalls(graph) if ranged else None
        self._compiled = calls.graph if calls else graph
        if ranged:  # weights are compiled in later, when it is too late to do without symbols
            symbols_of(self._compiled.placeholders)
        super().__init__(graph, calls)

    def prepare(self, weights: Sequence[Tensor]) -> Run:
        """See `PreparedExecutable.prepare`."""
        settings = {**self._settings, "freezing": bool(weights)}
        if not self._reduced:
            settings |= settings_for_casts(self._compiled.module.graph)
        with inductor_lock, disable_current_modes(), warnings.catch_warnings():
            # Said by Inductor's own tuner about itself.
            warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)
            module, negated = prepared_module(self._compiled, weights, self._reduced)
            places = module.graph.find_nodes(op="placeholder")
            if self.serves_range:
                multiply_by_onednn(module, ranged=True)
                run: Run = RangedRun(
                    places, lambda inputs: compile_frozen_with_inductor(module, inputs, settings)
                )
            else:
                self._choose_kernels(module)
                mode = mode_for_inductor()
                inputs = [fake(p.meta["val"], mode) for p in places]
                run = _compile(module, inputs, settings)
            if self._reserve:
                keep_freed_memory(estimate_peak_bytes(module.graph))
            return wrap_for_lazy_inputs(run, _is_negated) if negated else run

    def _choose_kernels(self, module: fx.GraphModule) -> None:
        """Puts kernels of this package in, where they suit the sizes."""
        background_builds.finish()
        use_skinny_gemm(module)
        multiply_by_onednn(module)
        few = use_small_channels(module)
        if use_winograd(module, self._reduced) or few:
            outputs = module.graph.output_node().all_input_nodes
            make_channels_last(module, range(len(outputs)))


class LiveInductorExecutable(InductorExecutable):
    """The same, which reads weights where they are."""

    def bind(self, weights: Sequence[Tensor]) -> tuple[Bound, Collection[int]]:
        """See `Executable.bind`."""
        return self.bind_live(weights)


def _compile(module: fx.GraphModule, inputs: Sequence[Any], settings: dict[str, Any]) -> Run:
    """Compiles a graph for concrete shapes; where that can be, without tracing it once more."""
    if settings["freezing"] and not _shares_memory(module.graph):
        decomposed = fx.GraphModule(module, copy_graph(module.graph))
        try:
            decompose_for_inductor(decomposed.graph)
            return compile_decomposed_with_inductor(decomposed, inputs, settings)
        except (AttributeError, TypeError) as error:  # private parts of another torch
            log.info("Inductor compiles the graph again for new sizes: %s", brief_error(error))
    return compile_frozen_with_inductor(module, inputs, settings)


def _shares_memory(graph: fx.Graph) -> bool:
    """Returns whether an output is an input, a constant or a view of one."""
    return any(find_view_base(x).op != "call_function" for x in graph.output_node().all_input_nodes)


def prepared_module(
    graph: Graph, weights: Sequence[Tensor | None], reduced: bool
) -> tuple[fx.GraphModule, bool]:
    """Copies a graph so that Inductor computes it right.

    Args:
        graph: The graph.
        weights: See `with_constants`.
        reduced: Whether it may compute in bfloat16.

    Returns:
        The copy; and whether some of its inputs are lazily negated ones, computed.
    """
    module = with_constants(graph, weights)
    negated = _describe_negated(module.graph.find_nodes(op="placeholder"))
    if weights:
        make_weights_dense(module.graph)
    widen_narrow_integers(module.graph)
    if reduced:
        compute_in_bfloat16(module)
    return module, negated


def with_constants(graph: Graph, weights: Sequence[Tensor | None]) -> fx.GraphModule:
    """Copies a graph so that it reads weights from buffers instead of inputs.

    Args:
        graph: The graph.
        weights: One per entry of `Graph.weights`, None for those that remain inputs; or none at
            all, then all remain inputs.
    """
    root = torch.nn.Module()
    copied = copy_graph(graph.module.graph)
    places = copied.find_nodes(op="placeholder")
    first = next(node for node in copied.nodes if node.op != "placeholder")
    for number, (place, weight) in enumerate(zip(graph.weights, weights, strict=False)):
        if weight is None:
            continue
        root.register_buffer(f"weight{number}", weight.detach())
        node = places[place]
        with copied.inserting_before(first):
            constant = copied.get_attr(f"weight{number}")
        constant.meta = copy.copy(node.meta)
        node.replace_all_uses_with(constant)
        copied.erase_node(node)
    return fx.GraphModule(root, copied)


def _is_negated(value: Any) -> bool:
    """Returns whether a value is lazily negated, which Inductor's loops would misread."""
    return isinstance(value, Tensor) and value.is_neg()


def _describe_negated(places: Sequence[fx.Node]) -> bool:
    """Describes lazily negated inputs as they are once computed; False: there are none."""
    negated = [place for place in places if _is_negated(place.meta["val"])]
    for place in negated:
        value = torch.ops.aten._neg_view.default(place.meta["val"])
        place.meta = {**place.meta, "val": value}
    return bool(negated)


def fake(value: Any, mode: FakeTensorMode) -> Any:
    """Returns a fake tensor of a mode, like a tensor; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    with mode:
        return empty_strided_like(value)


Compile = Callable[[Sequence[Any]], Run]
"""Compiles for (fake) inputs."""

_MOST = 16  # programs for sizes of which an assumption does not hold


class RangedRun:
    """Runs the program for all sizes, or one that is made for those of a call.

    Args:
        places: Placeholders of the graph that is compiled, with the sizes of one call.
        compile_for: Compiles the graph.

    Raises:
        CompileError: See `symbols_of`.
    """

    def __init__(self, places: Sequence[fx.Node], compile_for: Compile):
        self._compile = compile_for
        symbols = symbols_of(places)
        self._read = SizeReader(places, list(symbols.values()))
        fresh = private.FreshSymbols({s: int(size) for s, size in symbols.items()})
        self._run = compile_for([symbolic(p, fresh) for p in places])
        guards = sympy.And(*fresh.guards)
        self._holds = sympy.lambdify(list(symbols), guards, modules=[dict(SIZE_FUNCTIONS)])
        self._is_always = guards is sympy.true
        self._lock = fork_safe_lock()
        self._exact: LRU[tuple[int, ...], Run] = LRU(_MOST)

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        """Runs a program on inputs of any sizes that the symbols allow."""
        if self._is_always:
            return self._run(*inputs)
        sizes = self._read(inputs)
        run = self._run if self._holds(*sizes) else self._exact_for(tuple(sizes), inputs)
        return run(*inputs)

    def _exact_for(self, sizes: tuple[int, ...], inputs: Sequence[Any]) -> Run:
        with self._lock, private.disable_current_modes():
            run = self._exact.get(sizes)
            if run is None:
                mode = private.FakeTensorMode(allow_non_fake_inputs=True)
                run = self._compile([_fake_like(x, mode) for x in inputs])
                self._exact.put(sizes, run)
            return run


def symbols_of(places: Sequence[fx.Node]) -> dict[sympy.Symbol, SizeWithExpression]:
    """Returns the symbols of the inputs' sizes and strides, and their values in this call.

    Args:
        places: Placeholders of a graph for concrete shapes that came from symbolic ones.

    Raises:
        CompileError: Inductor cannot be given symbols for them: one stands for less than 2, or
            is not the size of any input by itself.
    """
    numbers = [number for place in places for number in _numbers(place)]
    sizes = [number for number in numbers if isinstance(number, SizeWithExpression)]
    found: dict[sympy.Symbol, SizeWithExpression] = {}
    for size in sizes:
        if isinstance(size.expression, sympy.Symbol):
            found.setdefault(size.expression, size)
    if any(size < 2 for size in found.values()):
        raise CompileError("Inductor assumes that symbolic sizes are at least 2")
    for size in sizes:
        if not size.expression.free_symbols <= found.keys():
            raise CompileError(f"Inductor has no symbol for the size {size.expression}")
    return found


def _numbers(place: fx.Node) -> list[int]:
    """Returns all that may vary of an input: itself, or the sizes and strides of its tensor."""
    value = place.meta["val"]
    numbers = (*sizes_of(place), *strides_of(place)) if isinstance(value, Tensor) else (value,)
    known = [number for number in numbers if isinstance(number, int)]
    if isinstance(value, Tensor) and len(known) != len(numbers):
        raise CompileError(f"the sizes of the input {place.name!r} are not known")
    return known


def symbolic(place: fx.Node, fresh: private.FreshSymbols) -> Any:
    """Returns a fake tensor, or a number, like an input, with symbols for what may vary."""

    def sized(number: int) -> int | torch.SymInt:
        if isinstance(number, SizeWithExpression) and number.expression.free_symbols:
            return fresh.size(number.expression)
        return int(number)

    value = place.meta["val"]
    numbers = [sized(number) for number in _numbers(place)]
    if not isinstance(value, Tensor):
        return numbers[0] if numbers else value
    return fresh.tensor(tuple(numbers[: value.ndim]), tuple(numbers[value.ndim :]), value)


def _fake_like(value: Any, mode: private.FakeTensorMode) -> Any:
    return mode.from_tensor(value) if isinstance(value, Tensor) else value
