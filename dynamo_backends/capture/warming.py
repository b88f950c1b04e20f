"""Compiles ahead what calls with given inputs need, backward graphs too (`warm_up`)."""

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dynamo_backends._torch_private import dynamo_counters
from dynamo_backends.interface.counters import total
from dynamo_backends.interface.errors import OptionError
from dynamo_backends.pipeline import background
from dynamo_backends.workers.progress import showing

Call = tuple[tuple[Any, ...], dict[str, Any]]
Inputs = Sequence[Any] | Mapping[str, Any] | Tensor

_ROUNDS = 6  # Dynamo makes a size symbolic when it changes; then a range is proven by three sizes


@dataclass(frozen=True)
class WarmUp:
    """The result of `warm_up`: how often it called the function, and what was compiled.

    Attributes:
        calls: Number of calls of the function.
        graphs: Number of graphs that Dynamo captured.
        executables: Number of executables that were compiled, or loaded from the disk cache.
        cache_hits: How many of these came from the disk cache.
        seconds: Elapsed time.
        complete: Whether the last calls compiled nothing.
    """

    calls: int
    graphs: int
    executables: int
    cache_hits: int
    seconds: float
    complete: bool


def warm_up(compiled: Callable[..., Any], inputs: Sequence[Inputs]) -> WarmUp:
    """Calls a compiled function with each set of inputs until nothing compiles any more.

    Calls the function with each set of inputs until a round of all sets causes no compilation, also
    none in the background. If one program serves a range of sizes, pass inputs of three or more
    sizes that differ in each changing dimension. If the backend compiles sizes one by one
    (`dynamo-backends list`), pass each size.

    Results are discarded. Random state, buffers of modules, and inputs that are written to are
    restored. With grad mode on, results are differentiated, so that backward graphs are compiled,
    too; no `.grad` is written.

    Examples:
        >>> warm_up(compiled, [(torch.zeros(b, 128),) for b in (1, 2, 5, 8)])
        >>> with dynamo_backends.run():
        ...     serve(compiled)

    Args:
        compiled: What `torch.compile` returned.
        inputs: For each call a tuple of arguments, a dict of keyword arguments, or one tensor.

    Raises:
        OptionError: `inputs` is a tensor or a dict, or something in it is none of these.
    """
    return warm_up_calls(compiled, _arguments(inputs))


def warm_up_calls(compiled: Callable[..., Any], sets: Sequence[Call]) -> WarmUp:
    """Warms up as `warm_up`, with positional and keyword arguments for each call.

    Args:
        compiled: What `torch.compile` returned.
        sets: The arguments of each call.
    """
    start, graphs, calls = time.perf_counter(), _captured(), 0
    complete = False
    made, hits = total.executables, total.cache_hits
    title = f"warming up on {len(sets)} sets of inputs"
    with _as_before(compiled, sets), showing(title) as said:
        for number in range(_ROUNDS):
            before = _captured(), total.compilations
            for i, (args, kwargs) in enumerate(sets):
                said(f"round {number + 1}: inputs {i + 1} of {len(sets)}")
                _call(compiled, args, kwargs)
                calls += 1
                background.wait_until_idle()
            complete = before == (_captured(), total.compilations)
            if complete:
                break
    return WarmUp(
        calls,
        _captured() - graphs,
        total.executables - made,
        total.cache_hits - hits,
        time.perf_counter() - start,
        complete,
    )


def _call(compiled: Callable[..., Any], args: Any, kwargs: Any) -> None:
    results = compiled(*args, **kwargs)
    if torch.is_grad_enabled():
        compute_sum_gradients(results)


def _captured() -> int:
    return int(dynamo_counters()["stats"]["unique_graphs"])


def _arguments(inputs: Any) -> list[Call]:
    if isinstance(inputs, Tensor | Mapping):
        raise OptionError(
            "warm_up takes a list with the arguments of each call, such as [(x,), (y,)], not a "
            f"{type(inputs).__name__}."
        )
    return [_of_one_call(each) for each in inputs]


def _of_one_call(given: Any) -> Call:
    if isinstance(given, Tensor):
        return (given,), {}
    if isinstance(given, Mapping):
        return (), dict(given)
    if isinstance(given, tuple | list):
        return tuple(given), {}
    raise OptionError(
        "the arguments of a call must be a tuple of positional arguments, a dict of keyword "
        f"arguments or a tensor, not {given!r} ({type(given).__name__})."
    )


@contextlib.contextmanager
def _as_before(compiled: Any, sets: Any) -> Iterator[None]:
    """Puts random state, buffers and inputs back."""
    modules = [m for m in _modules(compiled) for m in m.modules()]
    buffers = [(m, name, b) for m in modules for name, b in m._buffers.items() if b is not None]
    given = [t for t in pytree.tree_leaves(sets) if isinstance(t, Tensor)]
    tensors = {id(t): t for t in (*(b for _, _, b in buffers), *given)}
    kept = [(t, t.detach().clone()) for t in tensors.values()]
    state = random.getstate()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(state)
            for module, name, buffer in buffers:
                module._buffers[name] = buffer
            with torch.no_grad():
                for tensor, value in kept:
                    _restore(tensor, value)


def _restore(tensor: Tensor, value: Tensor) -> None:
    """Writes only what changed: frozen weights are prepared anew after every write."""
    same = torch.equal(tensor, value) or torch.allclose(tensor, value, 0, 0, equal_nan=True)
    if not same:
        tensor.detach().copy_(value)


def _modules(compiled: Any) -> list[nn.Module]:
    """Returns those that a compiled function is, belongs to, or closes over."""
    found = [compiled, getattr(compiled, "_orig_mod", None), getattr(compiled, "__self__", None)]
    function = getattr(compiled, "_torchdynamo_orig_callable", compiled)
    found += [getattr(function, "__self__", None)]
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            found.append(cell.cell_contents)
    code = getattr(function, "__code__", None)
    names = code.co_names if code is not None else ()
    found += [getattr(function, "__globals__", {}).get(name) for name in names]
    return [x for x in found if isinstance(x, nn.Module)]


def compute_sum_gradients(results: Any) -> None:
    """Computes gradients of the results' sum and drops them; no `.grad` changes.

    Args:
        results: What a call returned; afterwards they cannot be differentiated again.

    Raises:
        RuntimeError: They could not be differentiated.
    """
    outputs = [t for t in pytree.tree_leaves(results) if _is_differentiable(t)]
    leaves = _leaves(outputs)
    if leaves:
        ones = [torch.ones_like(t) for t in outputs]
        torch.autograd.grad(outputs, leaves, ones, allow_unused=True)


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and value.grad_fn is not None


def _leaves(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensors without a history on which the outputs depend."""
    leaves: dict[int, Tensor] = {}
    open_nodes = [t.grad_fn for t in outputs]
    seen = set()
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves[id(variable)] = variable
        open_nodes += [following for following, _ in node.next_functions]
    return list(leaves.values())
