"""Prepares weights once, and again when their contents have changed.

This is the one owner of that policy; docs/verification.md has it in words. An executable offers
only two hooks: `bind`, which prepares weights, and perhaps `bind_live`, which reads them where they
are.
"""

import functools
import operator
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dynamo_backends._torch_private import flatten_wrapper, has_storage, strip_conj_neg_bits
from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.interface.counters import (
    VENDOR,
    StageClock,
    time_stage,
    total,
    use_stage_clock,
)
from dynamo_backends.interface.executable import Bound, Executable
from dynamo_backends.interface.report import GraphReport
from dynamo_backends.runtime.device_tensor import device_value_of, handle_of

Policy = Literal["probe", "strict", "off"]

_RUN = 16  # elements; one cache line of float32
_RUNS = 4
_LINE = 64  # bytes; where runs begin, if they can
_CANDIDATES = 16
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_snapshots: "weakref.WeakSet[WeightSnapshot]" = weakref.WeakSet()


@functools.cache
def _watch_optimizers() -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(_note_step)


def _note_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Marks the snapshots of the weights that an optimizer has updated."""
    alive = list(_snapshots)
    if not alive:
        return
    stepped = _storages(p for group in optimizer.param_groups for p in group["params"])
    for snapshot in alive:
        snapshot.note_optimizer_step(stepped)


def _storages(tensors: Iterable[Tensor]) -> frozenset[int]:
    # Of these tensors, not of those that stand in for them while a step is captured.
    with torch._C.DisableTorchFunction():
        parts = [part for tensor in tensors for part in flatten_wrapper(handle_of(tensor))]
        return frozenset(t.untyped_storage().data_ptr() for t in parts if has_storage(t))


def value_bits(tensor: Tensor) -> Tensor:
    """Returns a tensor's values as integer bits, so that NaN equals NaN."""
    return memory_bits(tensor.resolve_conj().resolve_neg())


def memory_bits(tensor: Tensor) -> Tensor:
    """Returns a view of memory as integers, ignoring lazy conjugation and negation."""
    tensor = strip_conj_neg_bits(tensor.detach())
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype in _INTEGER.values():
        return tensor
    return tensor.view(_INTEGER[tensor.element_size()])


def _line(bits: Tensor) -> Tensor:
    """Returns all elements in memory order; of a tensor with gaps, those along its longest side."""
    order = sorted(range(bits.ndim), key=lambda d: bits.stride(d), reverse=True)
    dense = bits.permute(order)
    if dense.is_contiguous():
        return dense.view(-1)
    longest = max(range(bits.ndim), key=bits.shape.__getitem__)
    middle = [slice(None) if d == longest else s // 2 for d, s in enumerate(bits.shape)]
    return bits[tuple(middle)]


def _samples(tensor: Tensor) -> list[Tensor]:
    """Views of runs of neighbouring elements: of many places, those where the fewest are zero.

    Scaling a weight does not change its zeros, and pruned weights have many.
    """
    line = _line(memory_bits(tensor))
    if line.numel() <= _RUN * _RUNS:
        return [line]
    last, size = line.numel() - _RUN, line.element_size()
    spread = (last * i // (_CANDIDATES - 1) for i in range(_CANDIDATES))
    starts = sorted({max(n - (line.data_ptr() + n * size) % _LINE // size, 0) for n in spread})
    filled = torch.stack([line[s : s + _RUN].count_nonzero() for s in starts])
    best = filled.argsort(descending=True, stable=True)[:_RUNS]
    return [line[starts[i] : starts[i] + _RUN] for i in best.tolist()]


def weight_addresses(weights: Sequence[Tensor]) -> tuple[int, ...]:
    """Returns the addresses of weights, as a lookup key."""
    found = tuple(map(Tensor.data_ptr, weights))
    return found if all(found) else tuple(map(_place, weights, found))


def _place(weight: Tensor, address: int) -> int:
    """An address, or for a tensor that lives on a device what tells its contents from others."""
    value = device_value_of(weight)
    return address if value is None else -id(value)


_References = Sequence["weakref.ref[Tensor]"]


def _are(refs: _References, weights: Sequence[Tensor]) -> bool:
    """Returns whether these are the same tensor objects."""
    return all(ref() is w for ref, w in zip(refs, weights, strict=True))


class WeightSnapshot:
    """The addresses, versions and sampled values of prepared weights.

    Args:
        weights: The weights.
        copied: Positions of those whose contents the backend copied.
        policy: How contents are watched.
        on_death: Called when one of the weights is garbage-collected.

    Attributes:
        refs: The tensor objects.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        copied: Collection[int],
        policy: Policy,
        on_death: Callable[[], None] = lambda: None,
    ):
        _watch_optimizers()
        self._copied = operator.itemgetter(*copied) if len(copied) > 1 else None
        self._single = next(iter(copied)) if len(copied) == 1 else None
        watched = self._watched(weights)
        self._values = [value for w in watched if (value := device_value_of(w)) is not None]
        self._stamps = [value.stamp for value in self._values]
        self._versioned = not any(w.is_inference() for w in watched)
        self._versions = [w._version for w in watched] if self._versioned else []
        self._stepped = False
        self._storages = _storages(watched)
        _snapshots.add(self)
        self._strict = policy == "strict"
        views: list[Tensor] = []
        self._runs: list[memoryview] = []
        for weight in watched:
            if device_value_of(weight) is not None:
                continue  # each write to it is counted
            if self._strict:
                views.append(memory_bits(weight))
                continue
            for run in _samples(weight):
                if run.device.type == "cpu" and run.is_contiguous() and run.numel():
                    self._runs.append(run.numpy().view(np.uint8).data)
                else:
                    views.append(run)
        self._bytes = b"".join(self._runs)
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for view in views:
            by_dtype.setdefault(view.dtype, []).append(view)
        self._views = list(by_dtype.values())
        self._contents = [self._read(group) for group in self._views]
        self.refs: _References = [weakref.ref(w, lambda _: on_death()) for w in weights]

    def has_same_weights(self, weights: Sequence[Tensor]) -> bool:
        """Returns whether these are the same tensor objects, wherever their memory is now."""
        return _are(self.refs, weights)

    def note_optimizer_step(self, storages: frozenset[int]) -> None:
        """Marks the snapshot stale if an optimizer updated one of its storages."""
        if not self._storages.isdisjoint(storages):
            self._stepped = True

    def _watched(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        if self._copied is not None:
            return self._copied(weights)
        return () if self._single is None else (weights[self._single],)

    @staticmethod
    def _read(views: list[Tensor]) -> Tensor:
        return torch.cat(views) if views[0].ndim == 1 else torch.cat([v.flatten() for v in views])

    def is_current(self, weights: Sequence[Tensor]) -> bool:
        """Returns whether weights still have the values of the snapshot."""
        watched = self._watched(weights)
        if not watched:
            return True
        if self._stepped:
            return False
        if self._values and [value.stamp for value in self._values] != self._stamps:
            return False
        if self._versioned and [w._version for w in watched] != self._versions:
            return False
        if b"".join(self._runs) != self._bytes:
            return False
        for views, contents in zip(self._views, self._contents, strict=True):
            if self._strict:
                parts = torch.split(contents, [v.numel() for v in views])
                if not all(torch.equal(v.flatten(), p) for v, p in zip(views, parts, strict=True)):
                    return False
            elif not torch.equal(torch.cat(views), contents):
                return False
        return True


MODELS = 4
"""Number of sets of weights that stay bound at first; the least recently used one is evicted."""

MOST_MODELS = 128
"""Number of sets that stay bound at most: one more for each set that comes back after it was
evicted, such as those of equal layers that one graph serves."""

WASTED = 3
"""Consecutive preparations for a single call each, after which weights count as changing."""

ASK_AGAIN = 16
"""Weights that keep changing are checked again every this many preparations."""


class WeightBinding:
    """Binds a block's weights, one set for each module instance.

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
        self._evicted: OrderedDict[tuple[int, ...], _References] = OrderedDict()
        self._limit = MODELS
        self._recent: _Model | None = None

    def bind(self, weights: Sequence[Tensor]) -> Bound:
        """Returns the function bound to these weights; rebinds changed ones."""
        model = self._recent
        key = weight_addresses(weights)
        if model is not None and model.key == key and model.is_current(weights):
            return model.bound
        with self._lock:
            return self._find(key, weights).bound

    def bind_ahead(self, weights: Sequence[Tensor]) -> None:
        """Binds weights before a call; discards them if they changed meanwhile."""
        before = WeightSnapshot(weights, range(len(weights)), self._policy, lambda: None)
        self.bind(weights)
        if not before.is_current(weights):  # it is not known which contents were prepared
            self._forget(weight_addresses(weights))

    def _find(self, key: tuple[int, ...], weights: Sequence[Tensor]) -> "_Model":
        model = self._models.pop(key, None)
        if model is None:  # weights that moved leave their old memory behind
            for old in [k for k, m in self._models.items() if m.snapshot.has_same_weights(weights)]:
                model = self._models.pop(old)
        if model is None:
            self._note_return(key, weights)
        if model is None or model.key != key or not model.is_current(weights):
            model = self._prepare(key, weights, model)
        self._models[key] = self._recent = model
        return model

    def _note_return(self, key: tuple[int, ...], weights: Sequence[Tensor]) -> None:
        """Makes room for weights that were evicted and come back.

        Sets that counted as changing because none had come back are forgotten: they will, too.
        """
        refs = self._evicted.pop(key, None)
        if refs is None or not _are(refs, weights) or self._limit >= MOST_MODELS:
            return
        self._limit += 1
        for other in [k for k, m in self._models.items() if m.is_evicting]:
            del self._models[other]

    def _evict(self) -> "_Model":
        key, model = self._models.popitem(last=False)
        self._evicted[key] = model.snapshot.refs
        if len(self._evicted) > MOST_MODELS:
            self._evicted.popitem(last=False)
        return model

    def _prepare(
        self, key: tuple[int, ...], weights: Sequence[Tensor], before: "_Model | None"
    ) -> "_Model":
        is_evicting = False
        if before is not None:
            self._report.rebinds += 1
            total.add(rebinds=1)
        elif is_evicting := len(self._models) >= self._limit:
            before = self._evict()
        wasted = 1 if before is None else before.wasted + 1
        with use_stage_clock(StageClock(self._report.stage_seconds)), time_stage(VENDOR):
            live = self._executable.bind_live(weights) if wasted > WASTED else None
            bound, copied = live or self._executable.bind(weights)
        is_asked = live is not None or wasted <= WASTED or wasted % ASK_AGAIN == 0
        watched = copied if is_asked else ()
        snapshot = WeightSnapshot(weights, watched, self._policy, self._forgetting(key))
        rest = wasted if live else 0
        is_evicting = is_evicting and wasted > WASTED
        return _Model(key, bound, snapshot, is_asked, wasted, rest, is_evicting)

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
        self._evicted.pop(key, None)
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
        is_evicting: Whether it counts as changing because sets before it were evicted.
    """

    key: tuple[int, ...]
    bound: Bound
    snapshot: WeightSnapshot
    is_asked: bool
    wasted: int
    rest: int
    is_evicting: bool

    def is_current(self, weights: Sequence[Tensor]) -> bool:
        """Returns whether weights at the same addresses are as they were prepared."""
        if not self.is_asked or not self.snapshot.is_current(weights):
            return False
        self.wasted = self.rest
        return True
