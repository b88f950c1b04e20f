"""What results should be: a graph computed in eager, call by call, and the same in float64.

In float64 the reference rounds where every kernel does, so it has the value that a program has in
its own types: `(x + c) - c` is what the addition leaves of `x`, and a cast to float16 and back is
computed.
"""

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import copy_captured
from dynamo_backends.graph.aliasing import is_view
from dynamo_backends.graph.eager_calls import call_in_eager
from dynamo_backends.graph.graph import copy_graph

aten = torch.ops.aten
prims = torch.ops.prims

# The state of torch's generators.


def snapshot_rng() -> tuple[Tensor, list[Tensor]]:
    """Returns the state of torch's default CPU and all CUDA generators."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), cuda


def restore_rng(state: tuple[Tensor, list[Tensor]]) -> None:
    """Sets torch's generators to the state that `snapshot_rng` returned."""
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])


# Which calls round, and how: the same in every kernel, or as each kernel likes.

CASTS = frozenset({aten._to_copy.default, prims.convert_element_type.default})

# IEEE 754 says what these are: the exact result, rounded once.
SUMS = frozenset({"add", "sub", "rsub"})
_QUOTIENTS = frozenset({"mul", "div", "sqrt", "reciprocal"})
_ROUNDED_ONCE = SUMS | _QUOTIENTS
_OF_PYTHON = {
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.truediv: "div",
    torch.add: "add",
    torch.sub: "sub",
    torch.mul: "mul",
    torch.div: "div",
}

# These select or move numbers, and compute none.
_EXACT = frozenset((
    "abs", "alias", "amax", "amin", "cat", "ceil", "clamp", "clamp_max", "clamp_min", "clone",
    "complex", "constant_pad_nd", "contiguous", "copy", "copysign", "cummax", "cummin",
    "diag_embed", "diagonal_copy", "diagonal_scatter", "embedding", "expand_copy", "fill",
    "flip", "floor", "fmax", "fmin", "frac", "full", "full_like", "gather", "hardtanh",
    "heaviside", "im2col", "index", "index_select", "isin", "kthvalue", "lift_fresh",
    "lift_fresh_copy", "masked_fill", "masked_scatter", "max", "max_pool2d_with_indices",
    "max_pool3d_with_indices", "maximum", "median", "min", "minimum", "mode", "nan_to_num",
    "nanmedian", "neg", "new_full", "new_ones", "new_zeros", "nextafter", "ones", "ones_like",
    "permute_copy", "pixel_shuffle", "pixel_unshuffle", "reflection_pad1d", "reflection_pad2d",
    "reflection_pad3d", "relu", "repeat", "replication_pad1d", "replication_pad2d",
    "replication_pad3d", "roll", "scalar_tensor", "select_copy", "select_scatter",
    "sgn", "sign", "slice_copy", "slice_scatter", "sort", "split_with_sizes_copy",
    "squeeze_copy", "stack", "t_copy", "take", "threshold", "_to_copy", "topk", "tril", "triu",
    "trunc", "unfold_copy", "_unsafe_index", "_unsafe_masked_index", "_unsafe_view",
    "unsqueeze_copy", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d",
    "view_copy", "where", "zeros", "zeros_like",
))  # fmt: skip


def is_exact(node: fx.Node) -> bool:
    """Returns whether a call only moves or selects elements, so that nothing is rounded."""
    if node.target is operator.getitem or node.target in CASTS or is_view(node):
        return True
    return _name(node) in _EXACT


def is_add_or_sub(node: fx.Node) -> bool:
    """Returns whether a call is `add`, `sub` or `rsub`; a reduction is not."""
    return _name(node) in SUMS


def is_rounded_once(node: fx.Node) -> bool:
    """Returns whether IEEE 754 fixes a call's result: exact, then rounded once.

    A product need not be if a sum follows: processors have an instruction for both, which rounds
    the sum alone.
    """
    return _name(node) in _ROUNDED_ONCE


def _name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        return name if namespace in ("aten", "prims") else ""
    if node.op == "call_method":
        return str(target)
    return _OF_PYTHON.get(target, "")  # type: ignore[arg-type]


# Graphs in float64.

_WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}


def module_in_float64(module: fx.GraphModule) -> fx.GraphModule:
    """Copies a functional graph module so that it computes in float64.

    What is rounded once by every kernel is rounded here, too.
    """
    return fx.GraphModule(module, graph_in_float64(module.graph))


def graph_in_float64(graph: fx.Graph) -> fx.Graph:
    """Copies a functional graph, replacing its dtype arguments by float64 ones."""
    copy = copy_graph(graph)
    for node in list(copy.nodes):
        if node.op in ("call_function", "call_method"):
            node.args = _map_dtypes(node.args)
            node.kwargs = _map_dtypes(node.kwargs)
            dtype = _dtype_of_rounding(node)
            if dtype is not None:
                with copy.inserting_after(node):
                    rounded = copy.call_function(round_to, (node, dtype))
                rounded.meta = dict(node.meta)
                node.replace_all_uses_with(rounded, lambda user, own=rounded: user is not own)
    return copy


def round_to(value: Any, dtype: torch.dtype) -> Any:
    """Rounds a float64 tensor to a dtype and back; returns anything else unchanged."""
    if not isinstance(value, Tensor) or value.dtype not in (torch.float64, torch.complex128):
        return value
    return value.to(dtype).to(value.dtype)


def _dtype_of_rounding(node: fx.Node) -> torch.dtype | None:
    """Returns the dtype to which every kernel rounds a call's result; None if kernels vary.

    Those that compute several operators in float16 or bfloat16 may round only the last one.
    """
    value = node.meta.get("val", node.meta.get("example_value"))
    if not isinstance(value, Tensor) or value.dtype not in _WIDER:
        return None
    if node.target in CASTS:
        return value.dtype
    return value.dtype if is_rounded_once(node) and value.dtype.itemsize >= 4 else None


def widen_to_float64(value: Any) -> Any:
    """Casts a floating-point tensor to float64, complex to complex128; else unchanged."""
    if isinstance(value, Tensor) and value.dtype in _WIDER:
        return value.to(_WIDER[value.dtype])
    return value


def _map_dtypes(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return _WIDER.get(value, value)
    if isinstance(value, list | tuple):
        return type(value)(map(_map_dtypes, value))
    if isinstance(value, dict):
        return {k: _map_dtypes(v) for k, v in value.items()}
    return value


# Methods that name a dtype.
_CASTS = {"float": "double", "half": "double", "bfloat16": "double", "cfloat": "cdouble"}


def captured_graph_in_float64(captured: fx.GraphModule) -> Callable[..., Any]:
    """Returns a float64 copy of a graph that Dynamo captured, as a function.

    Its inputs must be in float64, too. Where the graph casts in ways that are not seen here, its
    results are less precise, or it raises.
    """
    module = module_in_float64(copy_captured(captured))
    for node in module.graph.nodes:
        if node.op == "call_method" and node.target in _CASTS:
            node.target = _CASTS[node.target]
    module.recompile()
    return module.forward


# Eager, call by call; nothing is alive for longer than it is needed.

Visit = Callable[[int, Any], None]
"""Gets the position of an output and its value, as soon as that is there."""

Call = Callable[[fx.Node, tuple[Any, ...], dict[str, Any]], Any]
"""Computes a call from its arguments."""


def _as_it_is(node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return call_in_eager(node.target, args, kwargs)


class EagerInterpreter:
    """Runs some outputs of a graph in eager, call by call, freeing values early.

    Args:
        module: Holds the graph and what its `get_attr` nodes name; not changed.
        wanted: Positions of the outputs that are computed; None: all.
        graph: Taken instead of the module's own.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        wanted: Collection[int] | None = None,
        graph: fx.Graph | None = None,
    ):
        graph = module.graph if graph is None else graph
        outputs: Any = graph.output_node().args[0]
        self._module = module
        self._placeholders = graph.find_nodes(op="placeholder")
        self._literals: dict[int, Any] = {}
        self._places: dict[fx.Node, list[int]] = {}
        for place, output in enumerate(outputs):
            if wanted is not None and place not in wanted:
                continue
            if isinstance(output, fx.Node):
                self._places.setdefault(output, []).append(place)
            else:
                self._literals[place] = output
        self._order = list(_ordered(graph, self._places))
        self._dying = _dying(self._order)

    def __call__(
        self,
        inputs: Sequence[Any],
        visit: Visit,
        load: Callable[[Any], Any] = lambda value: value,
        call: Call = _as_it_is,
    ) -> None:
        """Runs the graph and passes each output to `visit` as soon as it is computed.

        Args:
            inputs: One per input of the graph.
            visit: Is shown each output, in the order in which they are computed.
            load: Is applied to an input when it is first read.
            call: Computes each call.
        """
        given = dict(zip(self._placeholders, inputs, strict=True))
        values: dict[fx.Node, Any] = {}
        for place, value in self._literals.items():
            visit(place, value)
        for node in self._order:
            if node.op == "placeholder":
                value = given[node]
                value = load(value.detach() if isinstance(value, Tensor) else value)
            elif node.op == "get_attr":
                value = operator.attrgetter(str(node.target))(self._module)
            else:
                args = fx.map_arg(node.args, values.__getitem__)
                kwargs = fx.map_arg(node.kwargs, values.__getitem__)
                value = call(node, args, kwargs)
                del args, kwargs
            for place in self._places.get(node, ()):
                visit(place, value)
            values[node] = value
            del value
            for dead in self._dying.get(node, ()):
                del values[dead]


def _ordered(graph: fx.Graph, wanted: Collection[fx.Node]) -> Iterator[fx.Node]:
    """Yields the nodes to compute, each input right before its first reader."""
    needed = _needed(wanted)
    loaded: set[fx.Node] = set()
    for node in graph.nodes:
        if node not in needed or node.op in ("placeholder", "get_attr"):
            continue
        for source in node.all_input_nodes:
            if source.op in ("placeholder", "get_attr") and source not in loaded:
                loaded.add(source)
                yield source
        yield node
    yield from (n for n in wanted if n.op in ("placeholder", "get_attr") and n not in loaded)


def _needed(wanted: Collection[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    waiting = list(wanted)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _dying(order: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Returns what nobody needs any more after each node; it may be the node itself."""
    last = {used: node for node in order for used in (*node.all_input_nodes, node)}
    dying: dict[fx.Node, list[fx.Node]] = {}
    for used, node in last.items():
        dying.setdefault(node, []).append(used)
    return dying
