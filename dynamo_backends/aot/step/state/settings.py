"""The settings of an optimizer: what a record is compared with, and the numbers of a call."""

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dynamo_backends.aot.step.state.hyperparameters import (
    group_constants,
    group_numbers,
    read_number,
)


class OptimizerSettings:
    """The settings of an optimizer, read again only if one is another object.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer
        self._values: list[Any] = []
        self._constants: tuple[Any, ...] = ()
        self._numbers: list[Any] = []
        self._is_plain = False

    def read(self) -> tuple[tuple[Any, ...], list[Any]]:
        """What is compared, and the numbers that are inputs."""
        values: list[Any] = []
        for group in self._optimizer.param_groups:
            values += group.values()
        before = self._values
        is_same = len(values) == len(before) and all(map(operator.is_, values, before))
        if not (is_same and self._is_plain):
            self._values = values
            self._constants = group_constants([self._optimizer])
            self._numbers = [read_number(place) for place in group_numbers([self._optimizer])]
            self._is_plain = self._has_only_tensors(values)
        return self._constants, self._numbers

    def _has_only_tensors(self, values: list[Any]) -> bool:
        """Whether nothing that was read changes without being another object."""
        fixed = (int, float, str, bool, tuple, type(None))
        is_fixed = all(isinstance(v, fixed) or _is_parameters(v) for v in values)
        states = self._optimizer.state.values()
        return is_fixed and all(
            isinstance(x, Tensor)
            for state in states
            if isinstance(state, Mapping)
            for x in state.values()
        )


def _is_parameters(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(p, Tensor) for p in value)
