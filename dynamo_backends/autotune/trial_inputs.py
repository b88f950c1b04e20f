"""Inputs to try candidates on: copies that nobody else sees, and what became of them.

Weights are not copied, because candidates prepare them once and know them by their identity. They
are compared with a copy after each trial instead, and put right if a candidate wrote to them.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_backends._torch_private import has_conj_or_neg_bit
from dynamo_backends.verify.mismatch import storage_address
from dynamo_backends.workers.race import Run


def clone_inputs(values: Sequence[Any], keep: Collection[int] = ()) -> list[Any]:
    """Clones tensors; clones of tensors that shared memory share memory with each other.

    Args:
        values: Tensors and other values.
        keep: Positions of tensors that are not copied; where gradients flow to them, detached.
    """
    memories: dict[int, Any] = {}
    return [_copy(v, memories, i in keep) for i, v in enumerate(values)]


def _copy(value: Any, memories: dict[int, Any], keep: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    place = storage_address(value)
    if keep:
        if not (value.requires_grad and torch.is_grad_enabled()):
            return value
        result = value.detach()  # gradients of a trial are nobody else's
    elif place is None or has_conj_or_neg_bit(value):
        result = value.detach().clone()
    else:
        if place not in memories:
            memories[place] = value.untyped_storage().clone()
        result = torch.empty(0, dtype=value.dtype, device=value.device)
        result.set_(memories[place], value.storage_offset(), value.shape, value.stride())
    return result.requires_grad_(value.requires_grad)


def clone_storage_bytes(tensor: Tensor) -> Tensor:
    """Returns a copy of a tensor's whole untyped storage, as uint8."""
    return _bytes(tensor).clone()


def _bytes(tensor: Tensor) -> Tensor:
    if storage_address(tensor) is None:
        return tensor.detach()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage())


class MutationDetector:
    """Detects writes to tensors by comparing their storages with earlier copies.

    Args:
        tensors: By position; others are not watched.
    """

    def __init__(self, tensors: dict[int, Tensor]):
        self._tensors = tensors
        self._before: dict[int, Tensor] = {}
        self._of: dict[int, int] = {}
        for position, tensor in tensors.items():
            key = storage_address(tensor) or id(tensor)
            self._of[position] = key
            if key not in self._before:
                self._before[key] = clone_storage_bytes(tensor)

    def mutated_positions(self) -> list[int]:
        """Returns the positions of the tensors whose storage was written to."""
        found: dict[int, bool] = {}
        for position, tensor in self._tensors.items():
            key = self._of[position]
            if key not in found:
                found[key] = not _equal(self._before[key], _bytes(tensor))
        return [position for position, key in self._of.items() if found[key]]

    def restore(self) -> None:
        """Writes the original contents back to the tensors that were mutated."""
        for position in self.mutated_positions():
            _bytes(self._tensors[position]).data.copy_(self._before[self._of[position]])


def _equal(first: Tensor, second: Tensor) -> bool:
    if first.layout != torch.strided:
        first, second = first.to_dense(), second.to_dense()
    return torch.equal(first, second)


class TrialInputs:
    """The inputs of a graph, from which each trial call gets fresh copies.

    Args:
        values: One per input; for symbols, numbers.
        static: Positions of parameters and buffers.
        mutated: Positions of the inputs that the graph itself writes to.
        watched: Whether writes to weights are noticed, and undone. Not where others write to them.
    """

    def __init__(
        self,
        values: Sequence[Any],
        static: Collection[int],
        mutated: Collection[int],
        watched: bool = True,
    ):
        self.values = list(values)
        self.mutated = frozenset(mutated)
        shared = {
            storage_address(v) for i, v in enumerate(values) if i not in static or i in mutated
        }
        self.uncopied = frozenset(
            i
            for i in static
            if i not in mutated and storage_address(values[i]) not in shared - {None}
        )
        weights = {
            i: v
            for i, v in enumerate(values)
            if watched and i in self.uncopied and isinstance(v, Tensor)
        }
        self.weights = MutationDetector(weights)

    def make_call_inputs(self) -> list[Any]:
        """Returns inputs for one call: weights themselves, copies of everything else."""
        return clone_inputs(self.values, self.uncopied)

    @property
    def copied_bytes(self) -> int:
        """Returns the bytes that one copy of the inputs takes, without weights."""
        copied = [v for i, v in enumerate(self.values) if i not in self.uncopied]
        return sum(v.numel() * v.element_size() for v in copied if isinstance(v, Tensor))

    def perturbed(self, seed: int = 0) -> "TrialInputs":
        """Returns inputs with other activations of the same kind, and the same weights.

        Floating-point values change by up to 10% and keep their sign. Integers, which may be
        indices, change places with others of the same tensor. What shares memory remains.
        """
        generator = torch.Generator().manual_seed(seed)
        others = clone_inputs(self.values, self.uncopied)
        places = [storage_address(v) for v in others]
        for i, value in enumerate(others):
            if i in self.uncopied or places[i] is None or places.count(places[i]) > 1:
                continue
            if value.is_floating_point():
                _multiply(value, generator)
            elif value.dim() > 1 and 0 not in value.stride():
                # Of rows, so that each column keeps its range; not of offsets, which are sorted.
                value.data.copy_(value.roll(1, 0 if len(value) > 1 else -1))
        result = object.__new__(TrialInputs)
        result.values, result.mutated, result.uncopied = others, self.mutated, self.uncopied
        result.weights = self.weights
        return result


class MutatedIntegerResetter:
    """Resets mutated integer inputs, such as a cache position, before each call.

    They may be indices, as the position at which a cache is written: if they grew with each call
    they would end beyond it, where eager raises and compiled code ends the process.

    Args:
        arguments: Arguments of the graph.
    """

    def __init__(self, arguments: TrialInputs):
        self._positions = [
            i
            for i in sorted(arguments.mutated)
            if isinstance(value := arguments.values[i], Tensor)
            and not (value.is_floating_point() or value.is_complex())
        ]
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # by identity, which the first keeps

    def save_initial_values(self, args: list[Any]) -> list[Any]:
        """Saves the integers that the graph mutates; returns the inputs unchanged."""
        for i in self._positions:
            self._before[id(args[i])] = args[i], args[i].clone()
        return args

    def wrap_with_reset(self, run: Run) -> Run:
        """Wraps a function so that each call starts from the saved integers."""
        if not self._positions:
            return run

        def call(args: list[Any]) -> Any:
            for i in self._positions:
                counter, value = self._before[id(args[i])]
                counter.copy_(value)
            return run(args)

        return call


def _multiply(value: Tensor, generator: torch.Generator) -> None:
    noise = torch.rand(value.shape, generator=generator, dtype=torch.float32)
    noise = (0.9 + 0.2 * noise).to(value.device, value.dtype)
    once = tuple(slice(0, 1) if s == 0 else slice(None) for s in value.stride())
    value.data[once].mul_(noise[once])


def find_mutated_inputs(run: Run, values: Sequence[Any]) -> frozenset[int]:
    """Returns the positions of inputs that a function mutates; calls it once, on copies."""
    args = clone_inputs(values)
    watch = MutationDetector({i: a for i, a in enumerate(args) if isinstance(a, Tensor)})
    run(list(args))
    return frozenset(watch.mutated_positions())
