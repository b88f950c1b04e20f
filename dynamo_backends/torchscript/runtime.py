"""Runs TorchScript graphs: weights as inputs, or frozen into the graph."""

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_backends import _torch_private as private
from dynamo_backends.graph.graph import Graph
from dynamo_backends.runtime.preparation import LiveExecutable, PreparedExecutable, Run
from dynamo_backends.torchscript.lowering import lower
from dynamo_backends.torchscript.settings import Fuser, fusing, without_deprecations

_CALLS_UNTIL_FUSED = 3  # one is profiled, one compiles the plan that the third one initialises


class ScriptExecutable(LiveExecutable):
    """TorchScript that reads weights where they are.

    Args:
        graph: With static shapes.
        fuser: The compiler that fuses operators; None: as TorchScript is set.
    """

    def __init__(self, graph: Graph, fuser: Fuser | None = None):
        run = private.script_function(lower(graph))
        super().__init__(graph, run if fuser is None else Fused(run, fuser))


class FrozenExecutable(PreparedExecutable):
    """TorchScript with weights frozen into the graph, and TorchScript's passes for such graphs.

    Args:
        graph: With static shapes.
        fuser: The compiler that fuses operators; None: as TorchScript is set.
    """

    def __init__(self, graph: Graph, fuser: Fuser | None = None):
        self._function = private.script_function(lower(graph))
        self._fuser = fuser
        super().__init__(graph)

    def prepare(self, weights: Sequence[Tensor]) -> Run:
        """See `PreparedExecutable.prepare`."""
        return self._fused(self.finish(self._frozen(weights)))

    def prepare_live(self) -> Run:
        """See `PreparedExecutable.prepare_live`."""
        return self._fused(self._function)

    def finish(self, module: Any) -> Run:
        """What becomes of the frozen module."""
        return module

    def _frozen(self, weights: Sequence[Tensor]) -> Any:
        tensors: list[Tensor | None] = [None] * len(self.graph.inputs)
        for place, weight in zip(self.graph.weights, weights, strict=True):
            tensors[place] = weight
        with without_deprecations(), torch.no_grad():
            return torch.jit.freeze(private.script_module(self._function, tensors))

    def _fused(self, run: Run) -> Run:
        return run if self._fuser is None else Fused(run, self._fuser)


class OptimizedExecutable(FrozenExecutable):
    """Frozen, and prepared by `torch.jit.optimize_for_inference`."""

    def finish(self, module: Any) -> Run:
        """See `FrozenExecutable.finish`."""
        with without_deprecations(), torch.no_grad():
            return torch.jit.optimize_for_inference(module)


class StaticExecutable(FrozenExecutable):
    """Frozen, and run by Static Runtime, which plans memory ahead."""

    def finish(self, module: Any) -> Run:
        """See `FrozenExecutable.finish`."""
        return _OneAtATime(private.static_module(module))


class _OneAtATime:
    """A function that only one thread may be in."""

    def __init__(self, run: Run):
        self._run = run
        self._lock = threading.Lock()

    def __call__(self, *args: Tensor) -> Sequence[Any]:
        with self._lock:
            return self._run(*args)


class Fused:
    """A TorchScript function whose first calls, which compile it, run with a fuser switched on.

    Args:
        run: The function.
        fuser: The fuser.
    """

    def __init__(self, run: Run, fuser: Fuser):
        self._run = run
        self._fuser = fuser
        self._left = _CALLS_UNTIL_FUSED

    def __call__(self, *args: Tensor) -> Sequence[Any]:
        """Calls the function."""
        if not self._left:
            return self._run(*args)
        with fusing(self._fuser), torch.no_grad():
            results = self._run(*args)
            self._left = max(0, self._left - 1)
        return results
