"""Trials: a call compiled alone, run once, and judged against eager.

For backends whose vendor knows better than a table what it can run, and may mean something else by
it than torch does.
"""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import (
    FakeTensorMode,
    OpOverload,
    counts_flops,
    disable_current_modes,
)
from dynamo_backends.graph.call_arguments import (
    collect_call_tensors,
    collect_tensors,
    dynamic_shape_reason,
    is_pointwise,
)
from dynamo_backends.graph.graph import Graph, Input, Role
from dynamo_backends.graph.layouts import infer_layout
from dynamo_backends.graph.planned_decomposition import Rules, compile_decomposed
from dynamo_backends.interface.errors import CompileError, LoweringError
from dynamo_backends.interface.logs import silence_loggers
from dynamo_backends.verify import restore_rng, snapshot_rng
from dynamo_backends.verify.trials.judge import EagerRefusedError, Judge, Run
from dynamo_backends.verify.trials.samples import make_samples, without_infinities

Compile = Callable[[Graph], Any]

LARGE = 1 << 20
"""Calls with more elements than this, inputs and outputs together, are tried on fewer."""

TOO_LARGE = 1 << 24
"""Calls with more elements than this are not run if they cannot be made on fewer."""

_SIZES = (4096, 1024, 256, 64, 16)
_ROWS = 2  # 1 is special to some operators


def single_call_graph(node: fx.Node) -> Graph:
    """Extracts one call, with those of its results that are used, into its own graph."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for source in node.all_input_nodes:
        copies[source] = graph.placeholder(source.name)
        copies[source].meta = {"val": source.meta["val"]}
    copy = graph.node_copy(node, copies.__getitem__)
    copy.meta = {"val": node.meta["val"]}
    graph.output(tuple(add_getitem_nodes(copy, node)))
    inputs = tuple(Input(n.name, Role.ACTIVATION) for n in copies.values())
    return Graph(fx.GraphModule(torch.nn.Module(), graph), "inference", inputs)


def used_result_indices(node: fx.Node) -> list[int]:
    """Returns the indices of a call's results that `getitem` reads; empty for one tensor."""
    if isinstance(node.meta["val"], Tensor):
        return []
    users = (u for u in node.users if u.target is operator.getitem)
    return sorted({int(u.args[1]) for u in users})  # type: ignore[arg-type]


def add_getitem_nodes(copy: fx.Node, node: fx.Node) -> list[fx.Node]:
    """Adds `getitem` nodes to a copied call for each result used of the original.

    Args:
        copy: At the end of its graph, with its `meta["val"]`.
        node: What it was copied from.
    """
    if isinstance(copy.meta["val"], Tensor):
        return [copy]
    items = []
    for index in used_result_indices(node):
        items.append(copy.graph.call_function(operator.getitem, (copy, index)))
        items[-1].meta = {"val": copy.meta["val"][index]}
    return items


def count_elements(node: fx.Node) -> int:
    """Returns how many elements a call's inputs and outputs have together."""
    return sum(t.numel() for t in collect_call_tensors(node))


def shrink_call(node: fx.Node) -> fx.Node:
    """Shrinks a large call's inputs, in a new graph; returns a small call as it is.

    An operator's meaning does not depend on how much it is given, but a vendor may give it another
    one, and finding that out should not take as long as a network.

    Returns:
        The call itself if it is small, cannot be made on less, or is not run (see
        `is_run_in_trial`).
    """
    if count_elements(node) <= LARGE or is_matmul_or_conv(node):
        return node
    values = [n.meta["val"] for n in node.all_input_nodes]
    for sizes in _fewer(node, values):
        found = _resized(node, sizes)
        if found is not None:
            return found
    return node


Sizes = list[list[int]]


def _fewer(node: fx.Node, values: Sequence[Tensor]) -> Iterator[Sizes]:
    """Sizes of the inputs of a call that may have the same meaning, one list per input."""
    if is_pointwise(node.target):
        for limit in _SIZES:
            sizes = [[min(n, limit) for n in v.shape] for v in values]
            if sum(map(math.prod, sizes)) <= LARGE // 8:
                yield sizes
        return
    largest = max((v for v in values if v.ndim), key=Tensor.numel, default=None)
    if largest is None:
        return
    for alike in (lambda v: True, lambda v: v.ndim == largest.ndim):
        yield [
            [min(v.shape[0], _ROWS), *v.shape[1:]]
            if v.ndim and v.shape[0] == largest.shape[0] and alike(v)
            else list(v.shape)
            for v in values
        ]
    if len(values) == 1 and not isinstance(node.meta["val"], Tensor):
        for dim in range(1, largest.ndim):  # what is split along the first dimension
            yield [[min(n, _ROWS) if d == dim else n for d, n in enumerate(largest.shape)]]


def _resized(node: fx.Node, sizes: Sizes) -> fx.Node | None:
    """Remakes a call on inputs of other sizes, in the same layout; None if it is invalid."""
    if not _holds_index(node, sizes):
        return None
    graph, copies, mode = fx.Graph(), {}, FakeTensorMode()
    for source, shape in zip(node.all_input_nodes, sizes, strict=True):
        value = source.meta["val"]
        copies[source] = graph.placeholder(source.name)
        with mode:
            made = torch.empty_strided(
                shape, _strides(value, shape), dtype=value.dtype, device=value.device
            )
        copies[source].meta = {"val": made}
    copy = graph.node_copy(node, copies.__getitem__)
    args, kwargs = fx.map_arg((copy.args, copy.kwargs), lambda n: n.meta["val"])
    try:
        with silence_loggers("torch._subclasses"), disable_current_modes(), torch.no_grad(), mode:
            copy.meta = {"val": node.target(*args, **kwargs)}  # type: ignore[operator]
    except Exception:  # whatever an operator's own checks raise
        return None
    if not _gives_alike(copy.meta["val"], node.meta["val"]):
        return None
    add_getitem_nodes(copy, node)
    return copy


def _gives_alike(value: Any, other: Any) -> bool:
    """Returns whether results agree in number, rank, and which of them are empty.

    Fewer rows split into less, and a part of them may be none.
    """
    if isinstance(value, Tensor) != isinstance(other, Tensor):
        return False
    kinds = ([(t.ndim, t.numel() == 0) for t in collect_tensors(v)] for v in (value, other))
    return next(kinds) == next(kinds)


def _holds_index(node: fx.Node, sizes: Sizes) -> bool:
    """Returns whether `select`'s index is in bounds: torch 2.11's fakes do not check."""
    if node.target is not torch.ops.aten.select.int:
        return True
    args: Any = node.args
    _, dim, index = args
    return not isinstance(index, int) or -sizes[0][dim] <= index < sizes[0][dim]


def _strides(value: Tensor, shape: Sequence[int]) -> list[int]:
    storage = infer_layout(value)
    strides, size = [0] * value.ndim, 1
    for d in reversed(storage.order):
        if d not in storage.expanded:
            strides[d] = size
            size *= shape[d]
    return strides


def is_run_in_trial(node: fx.Node) -> bool:
    """Returns whether a trial runs the call; else it only compiles it.

    Large products are not: their result is one tensor, and what takes the time of a network is
    what vendors know best. Nor is what cannot be made smaller and would need gigabytes in float64.

    Args:
        node: The call (see `shrink_call`).
    """
    size = count_elements(node)
    return size <= LARGE or (size <= TOO_LARGE and not is_matmul_or_conv(node))


def is_matmul_or_conv(node: fx.Node) -> bool:
    """Returns whether a call is a matrix product or convolution with one result."""
    one = isinstance(node.meta["val"], Tensor)
    return one and isinstance(node.target, OpOverload) and counts_flops(node.target)


def why_untriable(node: fx.Node, vendor: str) -> str | None:
    """Returns why a call cannot be tried, such as a sparse input; None if it can."""
    if any(not isinstance(n.meta.get("val"), Tensor) for n in node.all_input_nodes):
        return "an input is not a tensor"
    for value in collect_call_tensors(node):
        if value.layout is not torch.strided:
            return f"{vendor} does not support {value.layout} tensors"
    return dynamic_shape_reason(node)


Spare = Callable[[fx.Node, Tensor], Tensor]
"""Takes what is accepted as a difference out of an input of a call."""


_NORMS = frozenset({"native_group_norm.default", "native_layer_norm.default"})


def sanitize_norm_sample(node: fx.Node, tensor: Tensor) -> Tensor:
    """Replaces infinities in the inputs of norms that also return their means.

    The mean of what holds one is that infinity, and NaN in eager; the result is NaN in both.
    """
    if str(node.target).removeprefix("aten.") in _NORMS and 1 in used_result_indices(node):
        return without_infinities(tensor)
    return tensor


def make_decomposing_compile(compile_graph: Compile, rules: Callable[[], Rules]) -> Compile:
    """Wraps a compiler so that it decomposes the graph's single call first.

    Args:
        compile_graph: Compiles what the call becomes.
        rules: How operators are decomposed in turn that come up inside.
    """

    def compile_call(graph: Graph) -> Any:
        return compile_decomposed(graph, [graph.calls[0].name], rules(), compile_graph)

    return compile_call


def sanitized_samples(node: fx.Node, spare: Spare) -> Iterator[list[Any]]:
    """Yields a call's samples without the values on which differences are accepted."""
    return ([spare(node, x) for x in args] for args in make_samples(node))


def try_call(
    node: fx.Node,
    make: Callable[[Graph], Run],
    vendor: str,
    plain: Callable[[BaseException], str],
    spare: Spare = lambda node, tensor: tensor,
    given: Iterable[list[Any]] | None = None,
) -> str | None:
    """Compiles a call alone and runs it on samples; returns what is wrong, or None.

    Args:
        node: The call (see `shrink_call`); if it is too large even so, it is compiled only.
        make: Compiles a graph.
        vendor: Whose name appears in what is said.
        plain: Makes one line of one of the vendor's errors.
        spare: Takes what is accepted as a difference out of an input.
        given: What it is run on instead of samples, however large it is.
    """
    graph = single_call_graph(node)
    if not graph.outputs:
        return "it has no tensor result"
    try:
        run = make(graph)
    except LoweringError as error:
        return error.reason
    except CompileError as error:
        return str(error)
    except MemoryError:  # says nothing about the call
        raise
    except Exception as error:  # of the vendor's Python half; none may reach the user
        return f"{vendor} cannot lower it: {plain(error)}"
    if given is None:
        if not is_run_in_trial(node):
            return None
        given = sanitized_samples(node, spare)
    return judge_on_samples(graph, run, given, vendor, plain)


def judge_on_samples(
    graph: Graph,
    run: Run,
    given: Iterable[list[Any]],
    vendor: str,
    plain: Callable[[BaseException], str],
) -> str | None:
    """Runs a compiled call on all samples; returns what is wrong, or None.

    Args:
        graph: From `single_call_graph`.
        run: The compiled call.
        given: Inputs, one list for each run (see `make_samples`).
        vendor: Whose name appears in what is said.
        plain: Makes one line of one of the vendor's errors.
    """
    judged, refused, state = 0, "", snapshot_rng()
    try:
        compare = Judge(graph)
        for args in given:
            try:
                wrong = compare(run, args)
            except EagerRefusedError as error:  # an operator does not take every number
                refused = str(error)
                continue
            if wrong is not None:
                return f"in a trial {vendor}'s {wrong}"
            judged += 1
    except MemoryError:  # says nothing about the call
        raise
    except Exception as error:
        return f"{vendor} cannot run it: {plain(error)}"
    finally:
        restore_rng(state)
    return None if judged else f"eager raises an error for the inputs of a trial ({refused})"
