"""Describes a call of a frozen step: arguments as a key, the program, the results."""

import enum
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dynamo_backends._torch_private import TensorProperties
from dynamo_backends.aot.step.program.record_program import RecordProgram
from dynamo_backends.aot.step.record.trie import Trie
from dynamo_backends.aot.step.runner import view_of
from dynamo_backends.aot.step.state.arguments import (
    BatchSpec,
    IdentityKey,
    flatten_batch,
    shared_memory,
    unflatten_batch,
)
from dynamo_backends.aot.step.state.hyperparameters import OptimizerSettings
from dynamo_backends.aot.step.state.inventory import Inventory

_SIMPLE = (
    int, str, bytes, type(None), type(...), enum.Enum, range, torch.dtype, torch.device,
    torch.layout, torch.memory_format,
)  # fmt: skip
_SIGNED = (float, complex, np.generic)  # 0.0 == -0.0, and nan != nan
_BY_IDENTITY = (
    nn.Module, torch.optim.Optimizer, type, FunctionType, BuiltinFunctionType, MethodType,
    ModuleType,
)  # fmt: skip


class NotComparable(Exception):
    """An argument, or a result, that one call cannot be told by from another; says of what kind."""


def add_to_call_key(value: Any, tensors: list[Tensor], parts: list[Any]) -> None:
    """Adds the hashable parts of a value to a call's key; collects its tensors.

    Raises:
        NotComparable: They have an object that cannot be compared.
    """
    kind = type(value)
    if isinstance(value, Tensor):
        tensors.append(value)
        parts.append((value.shape, value.dtype, value.requires_grad))
    elif kind is tuple or kind is list:
        parts.append((kind, len(value)))
        for item in value:
            add_to_call_key(item, tensors, parts)
    elif kind is dict:
        parts.append((dict, tuple(value)))
        for item in value.values():
            add_to_call_key(item, tensors, parts)
    elif isinstance(value, _SIGNED):
        parts.append((kind, repr(value)))
    elif isinstance(value, _SIMPLE):
        parts.append((kind, value))
    elif isinstance(value, _BY_IDENTITY):
        parts.append((kind, IdentityKey(value)))
    elif kind is SimpleNamespace:
        parts.append(kind)
        add_to_call_key(vars(value), tensors, parts)
    else:
        leaves, spec = flatten_batch(value)
        if any(leaf is value for leaf in leaves):
            raise NotComparable(kind.__name__)
        parts.append(spec)
        for leaf in leaves:
            add_to_call_key(leaf, tensors, parts)


@dataclass(frozen=True)
class Source:
    """The source of a tensor of a call.

    Attributes:
        kind: "argument", "state" (what lives on), "gradient" (of what lives on), "output" (of the
            program), or "constant" (a tensor that the function reads from elsewhere).
        value: The position of the argument or state, the number of the output, or the tensor.
        is_fresh: Of a constant: the function makes it anew at each call.
    """

    kind: str
    value: Any
    is_fresh: bool = False

    def tensor(
        self, arguments: Sequence[Tensor], state: Sequence[Tensor], outputs: Mapping[int, Tensor]
    ) -> Any:
        """Returns the tensor that an argument is."""
        if self.kind == "argument":
            return arguments[self.value]
        if self.kind == "output":
            return outputs[self.value]
        if self.kind == "constant":
            return self.value.clone() if self.is_fresh else self.value
        tensor = state[self.value]
        return tensor.grad if self.kind == "gradient" else tensor


class Result:
    """The structure of a function's result, to be put together again.

    Args:
        value: What it has returned.
        source: Says where a tensor of it comes from.

    Raises:
        NotComparable: It has an object that cannot be made again.
    """

    def __init__(self, value: Any, source: Callable[[Tensor], Source]):
        self._single = source(value) if isinstance(value, Tensor) else None
        self._leaves: list[Any] = []
        self._spec: BatchSpec | None = None
        if self._single is not None:
            return
        leaves, self._spec = flatten_batch(value)
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                self._leaves.append(source(leaf))
            elif isinstance(leaf, (*_SIGNED, *_SIMPLE, *_BY_IDENTITY)):
                self._leaves.append(leaf)
            else:
                raise NotComparable(type(leaf).__name__)

    def is_like(self, other: "Result") -> bool:
        """Returns whether another call has returned the same, but for the contents of tensors."""
        return (
            self._spec == other._spec
            and _is_like(self._single, other._single)
            and len(self._leaves) == len(other._leaves)
            and all(map(_is_like, self._leaves, other._leaves))
        )

    def sources(self) -> list[Source]:
        """Returns the sources of all tensors."""
        every = [self._single, *self._leaves]
        return [each for each in every if isinstance(each, Source)]

    def value(self, tensor: Callable[[Source], Tensor]) -> Any:
        """Puts the result of a call together."""
        if self._single is not None:
            return tensor(self._single)
        assert self._spec is not None
        leaves = [tensor(each) if type(each) is Source else each for each in self._leaves]
        return unflatten_batch(leaves, self._spec)


def _is_like(a: Any, b: Any) -> bool:
    if isinstance(a, Source) and isinstance(b, Source):
        same = a.value is b.value if a.kind == "constant" else a.value == b.value
        return a.kind == b.kind and same
    if type(a) is not type(b):
        return False
    return repr(a) == repr(b) if isinstance(a, _SIGNED) else a is b or bool(a == b)


class FrozenCall:
    """Replays a recorded call of a step without running its Python.

    Args:
        program: What computes it.
        trie: Trie of the record.
        sources: Where the tensors that are no results of calls come from, by their numbers.
        numbers: Those in Python that are inputs of the program.
        result: What the call returns.
        settings: Settings of the optimizers of the step.
        free: Which numbers of these are inputs; others are as they are now.
        arguments: The tensors among the arguments, as they were before the program ran.
        with_gradient: Ids of those, and of other tensors, that had a gradient.
    """

    def __init__(
        self,
        program: RecordProgram,
        trie: Trie,
        sources: dict[int, Source],
        numbers: Sequence[Any],
        result: Result,
        settings: Sequence[OptimizerSettings],
        free: Container[int],
        arguments: Sequence[Tensor],
        with_gradient: Container[int],
    ):
        self.program = program
        self._trie = trie
        self._sources = sources
        self._numbers = tuple(numbers)
        self._result = result
        returned = [s.value for s in result.sources() if s.kind == "output"]
        self._views = {n: trie.aliases[n] for n in returned if n in trie.aliases}
        self._settings = settings
        self._structure = [each.read()[0] for each in settings]
        self._before = [number for each in settings for number in each.read()[1]]
        self._free = free
        self._others = [s.value for s in sources.values() if s.kind == "constant"]
        given = [*arguments, *self._others]
        self._properties = TensorProperties(given)
        self._shared = shared_memory(given)
        self._leaves = [i for i, x in enumerate(given) if x.requires_grad]
        self._gradients = [id(given[i]) in with_gradient for i in self._leaves]

    def __call__(self, arguments: Sequence[Tensor], inventory: Inventory) -> "tuple[Any] | None":
        """Runs the call; None if this is another one.

        Args:
            arguments: The tensors among the arguments; they share memory as when this was made.
            inventory: What lives on.

        Raises:
            OutOfRangeError: Positions are out of range; nothing has changed.
        """
        program, state = self.program, inventory.tensors
        compiled = program.compiled
        if compiled.prefers_eager or compiled.comparison is not None:
            return None
        given = [*arguments, *self._others]
        if not self._properties.are_unchanged(given):
            return None
        if self._others and shared_memory(given) != self._shared:
            return None
        if self._leaves and not self._have_gradients(given):
            return None
        numbers = self._read_numbers()
        if numbers is None:
            return None
        sources = self._sources
        inputs = {n: sources[n].tensor(arguments, state, {}) for n in program.calls.all_inputs}
        if not program.accepts(state, numbers, list(inputs.values())):
            return None
        outputs = program.run(
            state, numbers, [inputs[n] for n in program.calls.inputs if n is not None]
        )
        for number, root in self._views.items():
            base = sources.get(root)
            bases = {root: None if base is None else base.tensor(arguments, state, outputs)}
            outputs[number] = view_of(self._trie, number, outputs, bases)
        return (self._result.value(lambda source: source.tensor(arguments, state, outputs)),)

    def _have_gradients(self, given: Sequence[Tensor]) -> bool:
        leaves = [given[i] for i in self._leaves]
        return all(x.is_leaf for x in leaves) and self._gradients == [
            x.grad is not None for x in leaves
        ]

    def _read_numbers(self) -> tuple[Any, ...] | None:
        """The numbers of the optimizers and of the record; None if other settings have changed."""
        numbers: list[Any] = []
        for settings, before in zip(self._settings, self._structure, strict=True):
            constants, values = settings.read()
            if constants is not before and constants != before:
                return None
            numbers += values
        if numbers != self._before:
            pairs = zip(numbers, self._before, strict=True)
            if not all(a == b or i in self._free for i, (a, b) in enumerate(pairs)):
                return None
        return (*numbers, *self._numbers)
