"""Records a graph on lazy tensors: Lazy Tensor Core's own program of it.

Operators for which Lazy Tensor Core has no node of its own would be run at once, by the CPU's
kernel, and cut the program in two. A trial of each kind of call finds them.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from dynamo_backends import _torch_private as private
from dynamo_backends._torch_private import OpOverload, disable_current_modes
from dynamo_backends._torch_private.forks import fork_safe_rlock
from dynamo_backends.graph.decomposition_tables import all_decomposition_rules
from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface.errors import CompileError, first_line

DEVICE = torch.device("lazy")
_lock = fork_safe_rlock()  # recording changes state that all lazy tensors share


@functools.cache
def start() -> None:
    """Registers Lazy Tensor Core's backend with torch; done once per process, on first use."""
    with _lock:
        try:
            private.start_lazy_backend()
        except RuntimeError as error:
            if "multiple backend fallbacks" not in str(error):  # somebody else has started it
                raise


def to_lazy_device(graph: Graph) -> fx.GraphModule:
    """Returns a copy of a graph whose factory calls create lazy tensors."""
    module = graph.copy().module
    for node in module.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, OpOverload):
            run = _verdict(node).run
            node.args, node.kwargs = _moved(node)
            node.target = run or node.target
    module.recompile()
    return module


def _moved(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns a call's arguments, with the lazy device wherever a device is meant."""
    args = tuple(DEVICE if isinstance(a, torch.device) else a for a in node.args)
    kwargs = {k: DEVICE if isinstance(a, torch.device) else a for k, a in node.kwargs.items()}
    formal = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    makes = "device" in formal[len(args) :] and kwargs.get("device") is None
    if makes and not any(isinstance(n.meta["val"], Tensor) for n in node.all_input_nodes):
        kwargs["device"] = DEVICE
    return args, kwargs


@dataclass
class LazyProgram:
    """A program that Lazy Tensor Core has compiled, found again by its hash.

    Attributes:
        hash: What Lazy Tensor Core keeps it under.
        values: What it reads; the entries of inputs are placeholders.
        inputs: (position in `values`, position among the graph's inputs).
        outputs: For each output of the graph which result of the program it is.
    """

    hash: str
    values: list[Any]
    inputs: list[tuple[int, int]]
    outputs: list[int]

    def __call__(self, *args: Tensor) -> list[Tensor]:
        """Runs the program on CPU tensors.

        Raises:
            RuntimeError: Lazy Tensor Core has dropped it.
        """
        values = self.values.copy()
        for place, index in self.inputs:
            values[place] = args[index]
        results = private.lazy_run(self.hash, values)
        return [results[i] for i in self.outputs]


def record(graph: Graph) -> LazyProgram:
    """Records and compiles a graph.

    Raises:
        CompileError: An operator was not recorded, or results are not what the graph promises.
    """
    start()
    with _lock, disable_current_modes(), torch.no_grad():
        recorded = _record(graph)
        _check(recorded, graph)
    for place, _ in recorded.inputs:
        recorded.values[place] = None
    return recorded


def _record(graph: Graph) -> LazyProgram:
    inputs = [blank.to(DEVICE) for blank in _blanks(graph)]
    outputs, fallen = _watched(lambda: list(to_lazy_device(graph)(*inputs)))
    if fallen:
        raise CompileError(f"Lazy Tensor Core cannot trace {', '.join(fallen)}")
    unique = list({id(t): t for t in outputs}.values())
    hash, ids, values = private.lazy_graph(unique)
    private.lazy_sync(unique)
    index = {private.lazy_id(t): i for i, t in enumerate(inputs)}
    places = [(place, index[i]) for place, i in enumerate(ids) if i in index]
    found = {i for _, i in places}
    for i, place in enumerate(graph.placeholders):
        if place.users and i not in found:
            raise CompileError(f"Lazy Tensor Core treats input {place.name} as a constant")
    order = {id(t): i for i, t in enumerate(unique)}
    return LazyProgram(hash, list(values), places, [order[id(t)] for t in outputs])


def _check(recorded: LazyProgram, graph: Graph) -> None:
    results = private.lazy_run(recorded.hash, recorded.values)
    if len(results) != len(set(recorded.outputs)):
        raise CompileError("an output is not the result of a traced computation")
    for node, i in zip(graph.outputs, recorded.outputs, strict=True):
        wrong = _mismatch(results[i], node.meta["val"])
        if wrong:
            raise CompileError(f"output {node.name} would be {wrong}")


def _mismatch(result: Tensor, promised: Tensor) -> str:
    if result.shape == promised.shape and result.dtype == promised.dtype:
        return ""
    found, wanted = (f"{t.dtype}{list(t.shape)}" for t in (result, promised))
    return f"{found} instead of {wanted}"


def _blanks(graph: Graph) -> list[Tensor]:
    """Data to record with. To Lazy Tensor Core equal numbers are one value, constants included."""
    taken = _numbers(graph)
    unused: dict[torch.dtype, Iterator[Tensor]] = {}
    blanks = []
    for place in graph.placeholders:
        value = place.meta["val"]
        if value.ndim or value.dtype == torch.bool:
            blanks.append(torch.zeros(value.shape, dtype=value.dtype))
            continue
        candidates = unused.setdefault(value.dtype, _unusual(value.dtype))
        blank = next((x for x in candidates if x.item() not in taken), None)
        if blank is None:
            raise CompileError(
                f"there are more scalars of {value.dtype} than distinct values to trace them with"
            )
        taken.add(blank.item())
        blanks.append(blank)
    return blanks


def _numbers(graph: Graph) -> set[Any]:
    """Returns the numbers among the arguments of a graph's calls."""
    leaves = (x for n in graph.calls for x in pytree.tree_leaves((n.args, n.kwargs)))
    return {x for x in leaves if isinstance(x, int | float | complex)}


def _unusual(dtype: torch.dtype) -> Iterator[Tensor]:
    """Numbers that kernels are unlikely to compute with; integers stay small, as indices are."""
    first, step = (_STEP, _STEP) if dtype.is_floating_point or dtype.is_complex else (3, 1)
    for i in range(_NUMBERS):
        number = torch.tensor(first + i * step).to(dtype)
        if dtype.is_floating_point or dtype.is_complex or number.item() == first + i:
            yield number


_STEP = 7919 * 2.0**-21
_NUMBERS = 2000


def _watched(run: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Returns what a function returns, and the operators that the CPU's kernels ran meanwhile."""
    before = private.lazy_fallbacks()
    result = run()
    after = private.lazy_fallbacks()
    return result, sorted(name for name, n in after.items() if n > before.get(name, 0))


@dataclass(frozen=True)
class _Verdict:
    """The way in which a call is recorded.

    Attributes:
        reason: Why it cannot be; empty if it can.
        run: The decomposition that is recorded in its place; None: the operator itself.
    """

    reason: str = ""
    run: Callable[..., Any] | None = None


_verdicts: dict[str, _Verdict] = {}


def why_not(node: fx.Node) -> str | None:
    """Returns why a call cannot be recorded; None if it can. Caches answers for the process."""
    return _verdict(node).reason or None


def _verdict(node: fx.Node) -> _Verdict:
    key = _signature(node)
    with _lock:
        if key not in _verdicts:
            start()
            with disable_current_modes(), torch.no_grad():
                _verdicts[key] = _find(node)
        return _verdicts[key]


def _find(node: fx.Node) -> _Verdict:
    reason = _try(node, node.target)  # type: ignore[arg-type]
    if reason is None:
        return _Verdict()
    rule = all_decomposition_rules().get(node.target)  # type: ignore[call-overload]
    if rule is not None and _try(node, rule) is None:
        return _Verdict(run=rule)
    return _Verdict(reason)


def _signature(node: fx.Node) -> str:
    described = fx.map_arg((node.args, node.kwargs), lambda n: _Described(n.meta["val"]))  # type: ignore
    return f"{node.target} {described}"


class _Described:
    def __init__(self, value: Any):
        known = isinstance(value, Tensor)
        self._text = f"{value.dtype}{list(value.shape)}" if known else repr(value)

    def __repr__(self) -> str:
        return self._text


def _try(node: fx.Node, function: Callable[..., Any]) -> str | None:
    """Returns why a function cannot be recorded with the arguments of a call; None if it can."""
    known: dict[fx.Node, Tensor] = {}
    for source in node.all_input_nodes:
        value = source.meta["val"]
        if not isinstance(value, Tensor):
            return "an input is not a tensor"
        known[source] = torch.zeros(value.shape, dtype=value.dtype, device=DEVICE)
    args, kwargs = fx.map_arg(_moved(node), known.__getitem__)
    try:
        results, fallen = _watched(lambda: function(*args, **kwargs))
    except Exception as error:
        return f"Lazy Tensor Core raised an error: {first_line(error)}"
    if fallen:
        return f"Lazy Tensor Core has no node for {', '.join(fallen)}"
    return _unlike(_list(results), _list(node.meta["val"]))


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]


def _unlike(results: Sequence[Any], promised: Sequence[Any]) -> str | None:
    for result, value in zip(results, promised, strict=True):
        if not isinstance(result, Tensor) or not isinstance(value, Tensor):
            return "a result is not a tensor"
        wrong = _mismatch(result, value)
        if wrong:
            return f"Lazy Tensor Core's result would be {wrong}"
        if result.device.type != "lazy":
            return "its result is not a lazy tensor"
    return None
