"""Runs a partitioned graph: backend blocks and eager parts, one after the other.

This is the hot path of every compiled call. A graph that a backend takes whole costs one list
look-up, the check of its frozen weights, and the backend's own call.
"""

import logging
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dynamo_backends.backend import Bound, Executable
from dynamo_backends.errors import FallbackRefusedError
from dynamo_backends.graph.freezing import Policy, Snapshot, pointers
from dynamo_backends.graph.graph import Graph
from dynamo_backends.report import GraphReport

log = logging.getLogger("dynamo_backends")

_MODELS_PER_GRAPH = 4  # instances of one module class that share a compiled graph
_CHANGES_BEFORE_LIVE = 3  # calls in a row that found changed weights
_ASK_AGAIN = 16  # every so many calls, weights that kept changing are checked after all

Getter = Callable[[Sequence[Any]], Sequence[Any]]


def pick(positions: Sequence[int]) -> Getter:
    """A fast function that picks the given positions out of a sequence."""
    if not positions:
        return lambda _: ()
    first, count = positions[0], len(positions)
    if tuple(positions) == tuple(range(first, first + count)):
        return operator.itemgetter(slice(first, first + count))
    return operator.itemgetter(*positions)


class Block:
    """A part of the graph that a backend runs, with its frozen weights and its way back to eager.

    Args:
        graph: The block; its module is the eager original.
        executable: The compiled block.
        policy: How frozen weights are watched.
        may_fall_back: Whether an error in compiled code is answered by running the original.
        report: Where re-bindings and fallbacks are counted.
    """

    def __init__(
        self,
        graph: Graph,
        executable: Executable,
        policy: Policy,
        may_fall_back: bool,
        report: GraphReport,
    ):
        self.executable = executable
        self._eager = graph.module
        self._policy = policy
        self._may_fall_back = may_fall_back
        self._report = report
        self._pick_weights = pick(graph.weights)
        self._pick_activations = pick(graph.activations)
        self._lock = threading.Lock()
        self._models: OrderedDict[tuple[int, ...], _Model] = OrderedDict()
        self._recent: _Model | None = None
        self._unbound: Bound | None = None
        if not graph.weights:
            self._unbound = executable.bind(())[0]
        self._failed = False

    def __call__(self, values: Sequence[Any]) -> Sequence[Any]:
        """Runs the block on one value per graph input."""
        if self._failed:
            return self._eager(*values)
        try:
            bound = self._unbound
            if bound is None:
                bound = self._bound(self._pick_weights(values))
            return bound(list(self._pick_activations(values)))
        except Exception as error:
            self._fall_back(error)
            return self._eager(*values)

    def split(self, values: Sequence[Any]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The weights and the activations among the values of the graph's inputs."""
        return self._pick_weights(values), self._pick_activations(values)

    def _bound(self, weights: Sequence[Tensor]) -> Bound:
        model = self._recent
        key = pointers(weights)
        if model is not None and model.snapshot.pointers == key and model.is_current(weights):
            return model.bound
        with self._lock:
            return self._find(key, weights).bound

    def _find(self, key: tuple[int, ...], weights: Sequence[Tensor]) -> "_Model":
        model = self._models.get(key)
        if model is None:  # weights that moved leave their old memory behind
            for old in [k for k, m in self._models.items() if m.snapshot.is_of(weights)]:
                model = self._models.pop(old)
        if model is None or model.snapshot.pointers != key or not model.is_current(weights):
            changes = 0
            if model is not None:
                changes = model.changes + 1
                self._report.rebinds += 1
            bound, copied = self.executable.bind(weights)
            if not _is_asked(changes):
                copied = ()
            snapshot = Snapshot(weights, copied, self._policy, lambda: self._forget(key))
            model = _Model(bound, snapshot, changes)
            self._models[key] = model
            while len(self._models) > _MODELS_PER_GRAPH:
                self._models.popitem(last=False)
        self._models.move_to_end(key)
        self._recent = model
        return model

    def _forget(self, key: tuple[int, ...]) -> None:
        self._models.pop(key, None)
        recent = self._recent
        if recent is not None and recent.snapshot.pointers == key:
            self._recent = None

    def _fall_back(self, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        if not self._may_fall_back:
            raise FallbackRefusedError(
                f"a compiled block of {self._report.backend} failed ({reason}) and "
                'fallback="error" forbids running it in eager'
            ) from error
        self._failed = True
        self._report.runtime_fallbacks.append(reason)
        log.warning(
            "%s: a compiled block failed and runs in eager from now on (%s)",
            self._report.backend,
            reason,
        )


def _is_asked(changes: int) -> bool:
    """Whether weights found changed at so many calls in a row are checked at the next one."""
    return changes < _CHANGES_BEFORE_LIVE or changes % _ASK_AGAIN == 0


@dataclass
class _Model:
    """One instance of the captured module: its prepared weights and what they looked like.

    Weights that were found changed at several calls in a row keep changing; they are then prepared
    anew at every call, and checked only now and then, so that they are frozen again when they rest.
    """

    bound: Bound
    snapshot: Snapshot
    changes: int

    def is_current(self, weights: Sequence[Tensor]) -> bool:
        if not _is_asked(self.changes):
            return False
        if self.snapshot.is_current(weights):
            self.changes = 0
            return True
        return False


@dataclass(frozen=True)
class Step:
    """One part of a program: which registers it reads, writes, and which are dead after it."""

    run: Callable[[Sequence[Any]], Sequence[Any]]
    read: Getter
    writes: tuple[int, ...]
    dead: tuple[int, ...]


class Program:
    """A whole captured graph for one set of shapes.

    Args:
        steps: In order.
        constants: Values of the registers after the graph's inputs.
        registers: How many registers there are.
        outputs: For each output a register, or a `Literal` for a value known at compile time.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        constants: Sequence[Tensor],
        registers: int,
        outputs: Sequence["int | Literal"],
    ):
        self._steps = tuple(steps)
        self._constants = list(constants)
        self._registers = registers
        self._outputs = tuple(outputs)
        single = self._steps[0] if len(self._steps) == 1 else None
        self.blocks = [step.run for step in self._steps if isinstance(step.run, Block)]
        self._single = single if single is not None and single.writes == self._outputs else None

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Runs the graph; clears the list of arguments."""
        values = args + self._constants
        args.clear()
        single = self._single
        if single is not None:
            return single.run(single.read(values))
        values.extend([None] * (self._registers - len(values)))
        for step in self._steps:
            results = step.run(step.read(values))
            for register, result in zip(step.writes, results, strict=True):
                values[register] = result
            for register in step.dead:
                values[register] = None
        return [x.value if isinstance(x, Literal) else values[x] for x in self._outputs]


@dataclass(frozen=True)
class Literal:
    """An output that is known at compile time: None or a number."""

    value: Any
