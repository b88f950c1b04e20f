"""Frozen yet never stale: notices that weights changed after a backend prepared them.

| way of changing a weight | what notices it |
|---|---|
| in-place operators under `no_grad`, `load_state_dict`, most optimizers | version counter |
| optimizers with `fused=True` | optimizer hook, contents |
| `p.data.add_()`, writes through numpy, DLPack or the untyped storage | contents |
| `p.data = new`, `set_` | address |
| a new Parameter, `load_state_dict(assign=True)`, another instance of the module | address |
| any, of tensors that live on a device (`DeviceTensor`) | count of writes |

An address says more than an identity: as long as the snapshot keeps the old memory alive, another
tensor at the same address with the same shape and strides (which Dynamo's guards ensure) is the
same memory.

Contents are sampled ("probe": four runs of 16 neighbouring elements of each weight, so that an
edit of a few elements through an alias can slip through) or compared whole ("strict"). Only weights
whose contents were copied need the version and content checks; a backend that reads torch's memory
itself sees every write.
"""

import functools
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from dynamo_backends._torch_private import has_storage, physical, plain_parts
from dynamo_backends.runtime.device_tensor import contents_of, handle_of

Policy = Literal["probe", "strict", "off"]

_RUN = 16  # elements; one cache line of float32
_RUNS = 4
_LINE = 64  # bytes; where runs begin, if they can
_CANDIDATES = 16
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_snapshots: "weakref.WeakSet[Snapshot]" = weakref.WeakSet()


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
        snapshot.note_step(stepped)


def _storages(tensors: Iterable[Tensor]) -> frozenset[int]:
    # Of these tensors, not of those that stand in for them while a step is captured.
    with torch._C.DisableTorchFunction():
        parts = [part for tensor in tensors for part in plain_parts(handle_of(tensor))]
        return frozenset(t.untyped_storage().data_ptr() for t in parts if has_storage(t))


def bits_of(tensor: Tensor) -> Tensor:
    """Returns the tensor's bits as integers, so that NaN equals itself; strides are kept."""
    return memory_bits(tensor.resolve_conj().resolve_neg())


def memory_bits(tensor: Tensor) -> Tensor:
    """A view of the bits in the tensor's memory, before it is conjugated or negated lazily."""
    tensor = physical(tensor.detach())
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype in _INTEGER.values():
        return tensor
    return tensor.view(_INTEGER[tensor.element_size()])


def _line(bits: Tensor) -> Tensor:
    """All elements in the order of memory; of a tensor with gaps, those along its longest side."""
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


def pointers(weights: Sequence[Tensor]) -> tuple[int, ...]:
    """Returns the addresses of the weights; what they are looked up by."""
    found = tuple(map(Tensor.data_ptr, weights))
    return found if all(found) else tuple(map(_place, weights, found))


def _place(weight: Tensor, address: int) -> int:
    """An address, or for a tensor that lives on a device what tells its contents from others."""
    value = contents_of(weight)
    return address if value is None else -id(value)


class Snapshot:
    """What a set of weights looked like when they were prepared.

    Args:
        weights: The weights.
        copied: Positions of those whose contents the backend copied.
        policy: How contents are watched.
        on_death: Called when one of the weights is garbage-collected.
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
        self._values = [value for w in watched if (value := contents_of(w)) is not None]
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
            if contents_of(weight) is not None:
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
        self._refs = [weakref.ref(w, lambda _: on_death()) for w in weights]

    def is_of(self, weights: Sequence[Tensor]) -> bool:
        """Returns whether these are the same tensor objects, wherever their memory is now."""
        return all(ref() is w for ref, w in zip(self._refs, weights, strict=True))

    def note_step(self, storages: frozenset[int]) -> None:
        """An optimizer has updated tensors in these storages."""
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
        """Returns whether weights at the same addresses still have the values of the snapshot."""
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
