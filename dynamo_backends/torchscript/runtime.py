"""Runs TorchScript graphs, weights frozen or as inputs, under settings changed for single calls."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from dynamo_backends import _torch_private as private
from dynamo_backends._torch_private.forks import fork_safe_lock, fork_safe_rlock
from dynamo_backends.graph.graph import Graph
from dynamo_backends.runtime.prepared_executables import (
    PreparedExecutable,
    Run,
    UnfrozenExecutable,
    wrap_for_lazy_inputs,
)
from dynamo_backends.runtime.ranged_calls import RangedCalls
from dynamo_backends.torchscript.lowering import lower

Fuser = Literal["nnc", "onednn"]
_lock = fork_safe_rlock()


@contextlib.contextmanager
def enabled_fuser(fuser: Fuser) -> Iterator[None]:
    """Context manager: TorchScript profiles what it runs and fuses with this fuser."""
    with _lock, private.torchscript_fuser(nnc=fuser == "nnc", onednn=fuser == "onednn"):
        yield


@contextlib.contextmanager
def without_deprecations() -> Iterator[None]:
    """TorchScript's own functions do not warn that they are deprecated.

    Up to torch 2.13 these are `DeprecationWarning`s, from 2.14 on `FutureWarning`s.
    """
    with _lock, warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):
            warnings.filterwarnings("ignore", "^`?torch\\.jit", category)
        yield


def onednn_graph_is_there() -> bool:
    """See `_torch_private.has_onednn_graph`, which changes a setting for a moment."""
    with _lock:
        return private.has_onednn_graph()


_AT_ONCE: dict[Any, Any] = {
    torch.ops.aten._conj.default: torch.ops.aten._conj_physical.default,
    torch.ops.aten._neg_view.default: torch.ops.aten.neg.default,
}
_CALLS_UNTIL_FUSED = 3  # one is profiled, one compiles the plan that the third one initialises


class ScriptExecutable(UnfrozenExecutable):
    """TorchScript that reads weights where they are.

    Args:
        graph: For concrete shapes.
        fuser: The compiler that fuses operators; None: as TorchScript is set.
        ranged: It is for all sizes that the symbols allow, which the script gets as numbers.
    """

    def __init__(self, graph: Graph, fuser: Fuser | None = None, ranged: bool = False):
        calls = RangedCalls(graph) if ranged else None
        run = private.script_function(lower(calls.graph if calls else graph))
        super().__init__(graph, run if fuser is None else Fused(run, fuser), calls)


class FrozenExecutable(PreparedExecutable):
    """TorchScript with weights frozen into the graph, and TorchScript's passes for such graphs.

    Args:
        graph: For concrete shapes.
        fuser: The compiler that fuses operators; None: as TorchScript is set.
        ranged: It is for all sizes that the symbols allow, which the script gets as numbers.
    """

    def __init__(self, graph: Graph, fuser: Fuser | None = None, ranged: bool = False):
        calls = RangedCalls(graph) if ranged else None
        self._scripted = calls.graph if calls else graph
        self._function = private.script_function(lower(self._scripted))
        self._fuser = fuser
        super().__init__(graph, calls)

    def prepare(self, weights: Sequence[Tensor]) -> Run:
        """See `PreparedExecutable.prepare`."""
        return self._fused(self.finish(self._frozen(weights)))

    def prepare_live(self) -> Run:
        """See `PreparedExecutable.prepare_live`."""
        return self._fused(self._function)

    def finish(self, module: Any) -> Run:
        """Returns what becomes of the frozen module."""
        return module

    def _frozen(self, weights: Sequence[Tensor]) -> Any:
        tensors: list[Tensor | None] = [None] * len(self._scripted.inputs)
        for place, weight in zip(self.graph.weights, weights, strict=True):
            tensors[place] = weight.resolve_conj().resolve_neg()
        values = [place.meta["val"] for place in self._scripted.placeholders]
        numbers = {i for i, value in enumerate(values) if isinstance(value, int)}
        with without_deprecations(), torch.no_grad():
            return torch.jit.freeze(private.script_module(self._function, tensors, numbers))

    def _fused(self, run: Run) -> Run:
        return run if self._fuser is None else Fused(run, self._fuser)


class OptimizedExecutable(FrozenExecutable):
    """Frozen, and prepared by `torch.jit.optimize_for_inference`."""

    def finish(self, module: Any) -> Run:
        """See `FrozenExecutable.finish`."""
        with without_deprecations(), torch.no_grad():
            return torch.jit.optimize_for_inference(module)


class StaticExecutable(FrozenExecutable):
    """Frozen, and run by Static Runtime, which plans memory ahead.

    Its kernels read memory as it is, and do not see that a tensor is a lazy conjugate.
    """

    def __init__(self, graph: Graph, ranged: bool = False):
        super().__init__(materialize_conj_neg(graph), ranged=ranged)

    def finish(self, module: Any) -> Run:
        """See `FrozenExecutable.finish`."""
        run = private.static_module(module)
        values = [place.meta["val"] for place in self.graph.placeholders]
        return _StaticModule(
            wrap_for_lazy_inputs(run) if any(map(private.has_conj_or_neg_bit, values)) else run
        )


def materialize_conj_neg(graph: Graph) -> Graph:
    """Replaces lazy conjugation and negation by operators that compute at once."""
    if not any(node.target in _AT_ONCE for node in graph.calls):
        return graph
    copy = graph.copy()
    for node in copy.calls:
        node.target = _AT_ONCE.get(node.target, node.target)
    return copy


class _StaticModule:
    """A module of Static Runtime, which only one thread may be in.

    It computes in inference mode. Its results would be inference tensors, which callers could not
    write to outside of that mode.
    """

    def __init__(self, run: Run):
        self._run = run
        self._lock = fork_safe_lock()

    def __call__(self, *args: Tensor) -> Sequence[Any]:
        with self._lock:
            results = self._run(*args)
        if torch.is_inference_mode_enabled():
            return results
        return list(map(_as_usual, results))


def _as_usual(x: Any) -> Any:
    """Returns a tensor in the same memory that is no inference tensor; what is none, as it is."""
    if not isinstance(x, Tensor) or not x.is_inference():
        return x
    usual = torch.empty(0, dtype=x.dtype, device=x.device)
    return usual.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())


class Fused:
    """A TorchScript function whose first calls run, and compile, under a fuser.

    Args:
        run: The function.
        fuser: The fuser.
    """

    def __init__(self, run: Run, fuser: Fuser):
        self._run = run
        self._fuser = fuser
        self._left = _CALLS_UNTIL_FUSED

    def __call__(self, *args: Tensor) -> Sequence[Any]:
        """Calls the script with its inputs."""
        if not self._left:
            return self._run(*args)
        with enabled_fuser(self._fuser), torch.no_grad():
            results = self._run(*args)
            self._left = max(0, self._left - 1)
        return results
