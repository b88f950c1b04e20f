"""Trials: a call compiled alone, run once, and judged against eager.

For backends whose vendor knows better than a table what it can run, and may mean something else by
it than torch does.
"""

import math
import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import disable_current_modes
from dynamo_backends.errors import CompileError, LoweringError
from dynamo_backends.graph.graph import Graph, Input, Role
from dynamo_backends.toolkit.layouts import storage_of
from dynamo_backends.toolkit.quiet import silenced
from dynamo_backends.verify import difference, in_float64, restore_rng, snapshot_rng, widen

T = TypeVar("T")

COMPARED_ELEMENTS = 1 << 20
"""Calls with more elements than this, inputs and outputs together, are compiled but not run."""

# The accuracy rule is about a whole tensor, as wide for float64 as for float32, and does not look
# further where the reference has NaN.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 5e-3,
    torch.bfloat16: 5e-2,
}

_aten = torch.ops.aten
_UNWRITTEN = (
    _aten.empty,
    _aten.empty_like,
    _aten.empty_permuted,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
)


def alone(node: fx.Node) -> Graph:
    """A graph of one call and its results that are used."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for source in node.all_input_nodes:
        copies[source] = graph.placeholder(source.name)
        copies[source].meta = {"val": source.meta["val"]}
    copy = graph.node_copy(node, copies.__getitem__)
    copy.meta = {"val": node.meta["val"]}
    results = [copy] if isinstance(node.meta["val"], Tensor) else []
    for index in used_results(node):
        item = graph.call_function(operator.getitem, (copy, index))
        item.meta = {"val": node.meta["val"][index]}
        results.append(item)
    graph.output(tuple(results))
    inputs = tuple(Input(n.name, Role.ACTIVATION) for n in copies.values())
    return Graph(fx.GraphModule(torch.nn.Module(), graph), "inference", inputs)


def used_results(node: fx.Node) -> list[int]:
    """Which of several results of a call are used."""
    if isinstance(node.meta["val"], Tensor):
        return []
    users = (u for u in node.users if u.target is operator.getitem)
    return sorted({int(u.args[1]) for u in users})  # type: ignore[arg-type]


def tensors(value: Any) -> list[Tensor]:
    """The tensors in the `meta["val"]` of a node."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [v for v in value if isinstance(v, Tensor)]
    return []


def elements(node: fx.Node) -> int:
    """How many elements a call reads and writes."""
    found = [t for n in (*node.all_input_nodes, node) for t in tensors(n.meta["val"])]
    return sum(t.numel() for t in found)


class EagerRefused(Exception):
    """Eager does not take the inputs of a trial."""


def judge(
    graph: Graph, run: Callable[[list[Any]], Sequence[Any]], args: Sequence[Any]
) -> str | None:
    """What is wrong with a call's results, in words; None if nothing is.

    Args:
        graph: From `alone`.
        run: The compiled call, on the list of its inputs.
        args: Inputs of the trial.

    Raises:
        EagerRefused: Eager does not take these inputs, so they show nothing.
    """
    try:
        expected = graph.module(*args)
        precise = in_float64(graph.module)(*map(widen, args))
    except Exception as error:
        raise EagerRefused(type(error).__name__) from error
    results = run(list(args))
    if _is_unwritten(graph):
        expected, results, precise = (
            [torch.zeros_like(x) for x in values] for values in (expected, results, precise)
        )
    compared: Sequence[Sequence[Any]] = (expected, results, precise)
    if not _is_elementwise(graph) and len(expected) == len(results):
        scaled = [_of_size_one(*three) for three in zip(*compared, strict=True)]
        compared = list(zip(*scaled, strict=True))
    with silenced("torch._dynamo"):  # which says that a reference has NaN
        wrong = difference(*compared)
    return _imprecise(graph, expected, results, precise) if wrong is None else wrong


def _is_unwritten(graph: Graph) -> bool:
    """Whether the call's result is memory that nobody wrote, which has no right contents."""
    return getattr(graph.calls[0].target, "overloadpacket", None) in _UNWRITTEN


def _is_elementwise(graph: Graph) -> bool:
    return torch.Tag.pointwise in getattr(graph.calls[0].target, "tags", ())


def _of_size_one(e: Tensor, r: Tensor, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three results of a call, divided by a power of two if the precise one is large.

    The accuracy rule allows an absolute error besides eager's own, which for sums of thousands of
    numbers, as in a trial's convolution, would be a smaller and smaller part of the results.
    """
    if not p.is_floating_point() or e.dtype != r.dtype or not p.numel():
        return e, r, p
    largest = p.nan_to_num(0, 0, 0).abs().max().item()
    if largest <= 1:
        return e, r, p
    part = 2.0 ** -math.floor(math.log2(largest))
    return e * part, r * part, p * part


def _imprecise(
    graph: Graph,
    expected: Sequence[Tensor],
    results: Sequence[Tensor],
    precise: Sequence[Tensor],
) -> str | None:
    elementwise = _is_elementwise(graph)
    for i, (e, r, p) in enumerate(zip(expected, results, precise, strict=True)):
        tolerance = TOLERANCE.get(e.dtype)
        if tolerance is None or not e.numel():
            continue
        both_nan = e.isnan() & r.isnan()
        # Eager's own NaN where there is a number, such as gelu(inf), need not be copied.
        e = torch.where(e.isnan() & ~p.isnan(), p.to(e.dtype), e)
        finite = e.nan_to_num(0, 0, 0).abs()
        scale = finite + 0.1 if elementwise else finite.max()
        if not (((e - r).abs() <= tolerance * scale) | (e == r) | both_nan).all():
            return f"output {i} is less precise than eager's"
    return None


class Answers(Generic[T]):
    """What a vendor has said about kinds of calls, remembered for the process."""

    def __init__(self) -> None:
        self._known: dict[str, T] = {}
        self._lock = threading.RLock()

    def __call__(self, kind: str, find: Callable[[], T]) -> T:
        """The answer about a kind of call, which `find` gives the first time."""
        with self._lock:
            if kind not in self._known:
                with disable_current_modes(), torch.no_grad():
                    self._known[kind] = find()
            return self._known[kind]


def kind_of(node: fx.Node) -> str:
    """What an answer depends on: operator, arguments, and which results are used.

    Of operators that work element by element, sizes matter only as far as they are 0, 1 or more.
    """
    elementwise = torch.Tag.pointwise in getattr(node.target, "tags", ())

    def describe(value: Tensor) -> str:
        if elementwise:
            sizes = [min(size, 2) for size in value.shape]
            return f"{value.dtype}{sizes}{storage_of(value)}"
        return f"{value.dtype}{list(value.shape)}{value.stride()}"

    described = fx.map_arg((node.args, node.kwargs), lambda n: describe(n.meta["val"]))
    large = elementwise and elements(node) > COMPARED_ELEMENTS
    return f"{node.target} {described} {used_results(node)} {large}"


def not_plain(node: fx.Node, vendor: str) -> str | None:
    """Why a call cannot even be tried, whatever a vendor's types are; None if it can."""
    if any(not isinstance(n.meta.get("val"), Tensor) for n in node.all_input_nodes):
        return "an input is not a tensor"
    for value in (t for n in (*node.all_input_nodes, node) for t in tensors(n.meta.get("val"))):
        if value.layout is not torch.strided:
            return f"{vendor} has no {value.layout} tensors"
        if any(not isinstance(s, int) for s in value.shape):
            return "a size depends on data"
    return None


def attempt(
    node: fx.Node,
    make: Callable[[Graph], Callable[[list[Any]], Sequence[Any]]],
    samples: Callable[[], Iterable[list[Any]]],
    vendor: str,
    plain: Callable[[BaseException], str],
) -> str | None:
    """What is wrong with a call compiled alone, and run on samples; None if nothing is.

    Calls with more than `COMPARED_ELEMENTS` elements are compiled only.

    Args:
        node: The call.
        make: Compiles a graph to a function of the list of its inputs.
        samples: Inputs for the call, one list for each run.
        vendor: Whose name appears in what is said.
        plain: Makes one line of one of the vendor's errors.
    """
    graph = alone(node)
    if not graph.outputs:
        return "it has no result that is a tensor"
    try:
        run = make(graph)
    except LoweringError as error:
        return error.reason
    except CompileError as error:
        return str(error)
    except Exception as error:  # of the vendor's Python half; none may reach the user
        return f"{vendor} cannot lower it: {plain(error)}"
    if elements(node) > COMPARED_ELEMENTS:
        return None
    state = snapshot_rng()
    try:
        answers = (_judged(graph, run, args, vendor, plain) for args in samples())
        return next((wrong for wrong in answers if wrong is not None), None)
    finally:
        restore_rng(state)


def _judged(
    graph: Graph,
    run: Callable[[list[Any]], Sequence[Any]],
    args: list[Any],
    vendor: str,
    plain: Callable[[BaseException], str],
) -> str | None:
    try:
        wrong = judge(graph, run, args)
    except EagerRefused:
        return None  # not inputs that this operator takes; the graph's own will be
    except Exception as error:
        return f"{vendor} cannot run it: {plain(error)}"
    return None if wrong is None else f"in a trial {vendor}'s {wrong}"
