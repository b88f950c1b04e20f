"""What becomes of weights that a backend prepares: bound once, and anew when they changed.

This is the one owner of that policy; docs/freezing.md has it in words. An executable only offers
two hooks: `bind`, which prepares weights, and perhaps `bind_live`, which reads them where they are.
"""

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.interface.counters import VENDOR, StageClock, clocked, stage, total
from dynamo_backends.interface.executable import Bound, Executable
from dynamo_backends.interface.report import GraphReport
from dynamo_backends.runtime.freezing import Policy, Snapshot, pointers

MODELS = 4
"""So many sets of weights stay bound; the one that was used least recently leaves."""

WASTED = 3
"""After so many preparations in a row that were used once, weights are taken to keep changing."""

ASK_AGAIN = 16
"""Every so many preparations, weights that keep changing are checked after all."""


class WeightBinding:
    """The weights of one block: a set for each instance of the module that it was captured from.

    Args:
        executable: The compiled block.
        policy: How contents are watched.
        report: Where it is counted how often weights were prepared anew.
    """

    def __init__(self, executable: Executable, policy: Policy, report: GraphReport):
        self._executable = executable
        self._policy = policy
        self._report = report
        self._lock = fork_safe_lock()
        self._models: OrderedDict[tuple[int, ...], _Model] = OrderedDict()
        self._recent: _Model | None = None

    def bound(self, weights: Sequence[Tensor]) -> Bound:
        """Returns the function that computes with these weights, which are prepared if need be."""
        model = self._recent
        key = pointers(weights)
        if model is not None and model.key == key and model.is_current(weights):
            return model.bound
        with self._lock:
            return self._find(key, weights).bound

    def prepare(self, weights: Sequence[Tensor]) -> None:
        """Binds weights ahead, beside calls and other threads, which may change them meanwhile."""
        before = Snapshot(weights, range(len(weights)), self._policy, lambda: None)
        self.bound(weights)
        if not before.is_current(weights):  # it is not known which contents were prepared
            self._forget(pointers(weights))

    def _find(self, key: tuple[int, ...], weights: Sequence[Tensor]) -> "_Model":
        model = self._models.pop(key, None)
        if model is None:  # weights that moved leave their old memory behind
            for old in [k for k, m in self._models.items() if m.snapshot.is_of(weights)]:
                model = self._models.pop(old)
        if model is None or model.key != key or not model.is_current(weights):
            model = self._prepare(key, weights, model)
        self._models[key] = self._recent = model
        return model

    def _prepare(
        self, key: tuple[int, ...], weights: Sequence[Tensor], before: "_Model | None"
    ) -> "_Model":
        if before is not None:
            self._report.rebinds += 1
            total.add(rebinds=1)
        elif len(self._models) >= MODELS:
            _, before = self._models.popitem(last=False)
        wasted = 1 if before is None else before.wasted + 1
        with clocked(StageClock(self._report.stage_seconds)), stage(VENDOR):
            live = self._executable.bind_live(weights) if wasted > WASTED else None
            bound, copied = live or self._executable.bind(weights)
        is_asked = live is not None or wasted <= WASTED or wasted % ASK_AGAIN == 0
        watched = copied if is_asked else ()
        snapshot = Snapshot(weights, watched, self._policy, self._forgetting(key))
        return _Model(key, bound, snapshot, is_asked, wasted, wasted if live else 0)

    def _forgetting(self, key: tuple[int, ...]) -> Callable[[], None]:
        """Forgets weights. A cycle of references would keep what is bound until a collection."""
        own = weakref.WeakMethod(self._forget)

        def forget() -> None:
            method = own()
            if method is not None:
                method(key)

        return forget

    def _forget(self, key: tuple[int, ...]) -> None:
        self._models.pop(key, None)
        recent = self._recent
        if recent is not None and recent.key == key:
            self._recent = None


@dataclass
class _Model:
    """One set of weights, bound.

    Attributes:
        key: Their addresses.
        bound: What computes with them.
        snapshot: What they looked like.
        is_asked: Whether they are checked before a call; else they are prepared at each.
        wasted: How many preparations in a row, with this one, were used once.
        rest: What `wasted` is when this one was used again: live weights stay live.
    """

    key: tuple[int, ...]
    bound: Bound
    snapshot: Snapshot
    is_asked: bool
    wasted: int
    rest: int

    def is_current(self, weights: Sequence[Tensor]) -> bool:
        """Returns whether weights at the same addresses are as they were prepared."""
        if not self.is_asked or not self.snapshot.is_current(weights):
            return False
        self.wasted = self.rest
        return True
