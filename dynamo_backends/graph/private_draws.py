"""Random numbers from a generator of one's own, beside calls that draw from torch's.

torch's generator belongs to all threads. A graph that draws is tried in another thread with numbers
that are equal each time, and takes none of those of the calls.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dynamo_backends._torch_private import OpOverload
from dynamo_backends.graph.random import SWITCHED_OFF

aten = torch.ops.aten

_CHOOSES_ALONE = frozenset({aten._fused_sdp_choice.default})  # who is to draw


class DrawsError(Exception):
    """A call would have drawn from torch's generator; the message names it."""


class PrivateDraws(TorchDispatchMode):
    """Inside: calls of this thread draw from a generator of their own, the same numbers each time.

    Those for which there is no way to say so raise `DrawsError` before they draw.

    Args:
        seed: Of the generator.

    Attributes:
        has_drawn: Whether any call has drawn.
    """

    def __init__(self, seed: int = 0):
        super().__init__()
        self.has_drawn = False
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchDispatchMode`."""
        kwargs = kwargs or {}
        if not _draws(func, args, kwargs):
            return func(*args, **kwargs)
        with self:
            made = func.decompose(*args, **kwargs)  # a dropout; in inference mode it comes whole
        if made is not NotImplemented:
            return made
        self.has_drawn = True
        if func is aten.native_dropout.default:
            return self._dropout(*args, **kwargs)
        twin = _with_generator(func)
        if twin is None or _given(func, args, kwargs).get("generator") is not None:
            raise DrawsError(f"{func} draws random numbers")
        position = [a.name for a in func._schema.arguments if not a.kwarg_only]
        args = [a for n, a in zip(position, args, strict=False) if n != "generator"]
        return twin(*args, **{**kwargs, "generator": self._generator})

    def _dropout(self, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        """As torch's kernel for CPUs does it."""
        mask = torch.empty(x.shape, dtype=torch.bool).bernoulli_(1 - p, generator=self._generator)
        return x.mul(mask).mul_(0.0 if p == 1 else 1 / (1 - p)), mask


def privately(run: Callable[[list[Any]], Sequence[Any]]) -> Callable[[list[Any]], Sequence[Any]]:
    """A function that draws the same numbers in each call, and none of torch's."""

    def call(args: list[Any]) -> Sequence[Any]:
        with PrivateDraws():
            return run(args)

    return call


def _draws(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    if torch.Tag.nondeterministic_seeded not in func.tags or func in _CHOOSES_ALONE:
        return False
    given = _given(func, args, kwargs)
    return not any(given.get(name) == off for name, off in SWITCHED_OFF)


def _given(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    arguments = func._schema.arguments
    given = dict(zip((a.name for a in arguments), args, strict=False))
    return {a.name: a.default_value for a in arguments} | given | kwargs


def _with_generator(func: OpOverload) -> OpOverload | None:
    """The overload of an operator that takes a generator, if there is one."""
    wanted = _types(func)
    if "generator" in wanted:
        return func
    packet = func.overloadpacket
    for name in packet.overloads():
        found = _types(getattr(packet, name))
        if found.pop("generator", None) is not None and found == wanted:
            return getattr(packet, name)
    return None


def _types(func: OpOverload) -> dict[str, str]:
    return {a.name: str(a.type) for a in func._schema.arguments}
