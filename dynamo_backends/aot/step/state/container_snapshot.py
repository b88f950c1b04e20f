"""Whether modules and optimizers still hold the same objects, without a loop in Python."""

import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = frozenset((int, float, bool, str, type(None)))
_chain = itertools.chain.from_iterable


class ContainerSnapshot:
    """The contents of modules and optimizers at one moment.

    Numbers and other plain settings in `param_groups`, and what is no tensor in the state of a
    parameter, may change.

    Args:
        models: Whose submodules, parameters and buffers are meant.
        optimizers: Whose groups, parameters and state are meant.
    """

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]):
        modules = [module for model in models for module in model.modules()]
        tables: list[Any] = [
            table for m in modules for table in (m._parameters, m._buffers, m._modules)
        ]
        self._tables = [table for table in tables if table]
        self._empty = [table for table in tables if not table]
        self._optimizers = [_OptimizerContents(optimizer) for optimizer in optimizers]
        self._in_modules = self._read()

    def _read(self) -> list[Any]:
        return [*_chain(map(dict.values, self._tables))]

    def is_current(self) -> bool:
        """Returns whether they hold the same objects now."""
        is_same = not any(self._empty) and _same(self._read(), self._in_modules)
        return is_same and all(optimizer.is_current() for optimizer in self._optimizers)


class _OptimizerContents:
    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer
        self._state = optimizer.state
        self._groups = optimizer.param_groups
        self._each = list(self._groups)
        self._settings = self._read_settings()
        self._parameters = self._read_parameters()
        self._owners = list(self._state)
        self._states: list[Any] = list(self._state.values())
        self._is_readable = all(type(state) is dict for state in self._states) and not any(
            isinstance(value, list) for group in self._each for key, value in group.items()
            if key != "params"
        )  # fmt: skip
        self._readers: list[tuple[Any, list[Any]]] = []
        if self._is_readable:
            self._lengths = list(map(len, self._states))
            self._readers = _readers(self._states)
            self._tensors = self._read_tensors()

    def _read_settings(self) -> list[Any]:
        return [*_chain(map(dict.values, self._each))]

    def _read_parameters(self) -> list[Any]:
        return [*_chain(group["params"] for group in self._each)]

    def _read_tensors(self) -> list[Any]:
        return [*_chain(_chain(map(get, states)) for get, states in self._readers)]

    def is_current(self) -> bool:
        optimizer, state = self._optimizer, self._state
        if not self._is_readable or optimizer.state is not state:
            return False
        if optimizer.param_groups is not self._groups or not _same(self._groups, self._each):
            return False
        if not self._has_same_settings() or not _same(self._read_parameters(), self._parameters):
            return False
        if not (_same(state, self._owners) and _same(state.values(), self._states)):
            return False
        try:
            return list(map(len, self._states)) == self._lengths and _same(
                self._read_tensors(), self._tensors
            )
        except KeyError:
            return False

    def _has_same_settings(self) -> bool:
        now, before = self._read_settings(), self._settings
        return len(now) == len(before) and (
            all(map(operator.is_, now, before))
            or all(
                a is b or (type(a) in _PLAIN and type(b) in _PLAIN)
                for a, b in zip(now, before, strict=True)
            )
        )


def _readers(states: Iterable[dict[Any, Any]]) -> list[tuple[Any, list[Any]]]:
    """For states with the same keys what reads their tensors, as a tuple of at least two."""
    by_keys: dict[tuple[Any, ...], list[Any]] = {}
    for state in states:
        keys = tuple(key for key, value in state.items() if isinstance(value, Tensor))
        by_keys.setdefault(keys, []).append(state)
    return [
        (operator.itemgetter(*keys, keys[0]), states) for keys, states in by_keys.items() if keys
    ]


def _same(now: Any, before: Sequence[Any]) -> bool:
    """Returns whether two collections have the same objects, in the same order."""
    return len(now) == len(before) and all(map(operator.is_, now, before))
