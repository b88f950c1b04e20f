"""Batches of a model's inputs: for calibration, and held out for the proof."""

import functools
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dynamo_backends.interface.errors import CompileError, OptionError

LEAST = 2
"""Batches: one to calibrate with, one held out."""

_EVERY = 3  # of so many batches one is held out

HOW = (
    "calibration=[...], a list of batches of the model's inputs, each one a dict by the names of "
    "its arguments, a tuple in their order, or a tensor"
)
"""How batches are given, for texts of errors."""


class Calibration:
    """Batches of a model's inputs.

    They are copied. Two with the same contents are equal.

    Args:
        batches: Each one the arguments of a call: by name, or in order.
    """

    def __init__(self, batches: Iterable[Mapping[str, Any] | Sequence[Any]]):
        self.batches = tuple(
            {k: _copy(v) for k, v in b.items()} if isinstance(b, Mapping) else tuple(map(_copy, b))
            for b in batches
        )

    @classmethod
    def parse(cls, given: Any, backend: str) -> "Calibration":
        """Batches as a user gives them.

        Args:
            given: A list or another iterable that ends.
            backend: For the text of the error.

        Raises:
            OptionError: They are none, or too few.
        """
        if isinstance(given, Calibration):
            return given
        if isinstance(given, Tensor | Mapping | str) or not isinstance(given, Iterable):
            kind = type(given).__name__
            raise OptionError(f"option 'calibration' of {backend} must be {HOW}; not a {kind}.")
        batches = [(b,) if isinstance(b, Tensor) else b for b in given]
        for batch in batches:
            if not isinstance(batch, Mapping | list | tuple):
                raise OptionError(
                    f"option 'calibration' of {backend} must be {HOW}; one batch is a "
                    f"{type(batch).__name__}."
                )
        if len(batches) < LEAST:
            raise OptionError(
                f"option 'calibration' of {backend} has {len(batches)} batches, but needs at least "
                f"{LEAST}: some are used for calibration, the others for validation. Give {HOW}."
            )
        return cls(batches)

    @functools.cached_property
    def digest(self) -> str:
        """A hash of the contents."""
        digest = hashlib.sha256()
        for batch in self.batches:
            pairs = batch.items() if isinstance(batch, dict) else enumerate(batch)
            for name, value in pairs:
                digest.update(f"{name!r} ".encode())
                _hash(value, digest)
        return digest.hexdigest()[:16]

    def __repr__(self) -> str:
        """Returns how many batches there are, and of what contents."""
        return f"Calibration({len(self.batches)} batches, {self.digest})"

    def __eq__(self, other: object) -> bool:
        """Returns whether the contents are the same."""
        return isinstance(other, Calibration) and self.digest == other.digest

    def __hash__(self) -> int:
        """Returns a hash of the contents."""
        return hash(self.digest)

    def __deepcopy__(self, memo: Any) -> "Calibration":
        """Itself: it never changes."""
        return self

    def placed(
        self, names: Sequence[str], values: Sequence[Any], arguments: "Arguments"
    ) -> list[dict[int, Tensor]]:
        """Batches as inputs of a captured graph, by position.

        Args:
            names: Of the graph's inputs that are no weights, as in the user's code; "" for others.
            values: What the graph is compiled for, one per name.
            arguments: Arguments of the captured function.

        Raises:
            OptionError: A batch lacks an argument that the graph reads.
            CompileError: The graph reads what is no argument, or too few batches have the sizes
                that it is compiled for.
        """
        places = {i: name for i, name in enumerate(names) if name}
        for name in places.values():
            if arguments.key(name) is None:
                raise CompileError(
                    f"a graph reads {name}, which is not an argument of the model, so the "
                    "calibration batches do not contain it; remove graph breaks, because "
                    "precision='int8' needs a model that is captured as one graph"
                )
        found = [
            given for number, batch in enumerate(self.batches)
            if (given := _inputs(batch, number, places, values, arguments)) is not None
        ]  # fmt: skip
        if len(found) < LEAST:
            shown = ", ".join(f"{n}: {_kind(values[i])}" for i, n in places.items())
            raise CompileError(
                f"only {len(found)} of {len(self.batches)} calibration batches have the dtypes and "
                f"shapes of this graph ({shown}), but precision='int8' needs at least {LEAST}; "
                "pass batches with the shapes of the call"
            )
        return found


@dataclass(frozen=True)
class Arguments:
    """The arguments of a captured function.

    Attributes:
        names: Names of those that have names, in order.
        positional: Name of the tuple of further ones; empty: there is none.
        keywords: Name of the dict of further ones; empty: there is none.
    """

    names: tuple[str, ...] = ()
    positional: str = ""
    keywords: str = ""

    def key(self, text: str) -> str | int | None:
        """Returns the name or position of an argument in a batch; None: it is no argument.

        Args:
            text: The argument as in the user's code: "x", "args[0]", "kwargs['x']".
        """
        if text in self.names:
            return text
        found = _ELEMENT.fullmatch(text)
        if found is None:
            return None
        name, position, key = found.groups()
        if position and name == self.positional:
            return int(position) + len(self.names)
        return key if key and name == self.keywords else None

    def named(self, batch: Sequence[Any]) -> dict[str | int, Any]:
        """Returns a batch in the order of the arguments, by names and positions."""
        return {**dict(enumerate(batch)), **dict(zip(self.names, batch, strict=False))}


_ELEMENT = re.compile(r"(\w+)\[(?:(\d+)|'(\w+)')\]")


def split(count: int) -> tuple[list[int], list[int]]:
    """Returns which batches calibrate, and which are held out: every third, or the last."""
    held_out = list(range(_EVERY - 1, count, _EVERY)) or [count - 1]
    return [i for i in range(count) if i not in held_out], held_out


def _inputs(
    batch: Mapping[str, Any] | Sequence[Any],
    number: int,
    places: Mapping[int, str],
    values: Sequence[Any],
    arguments: "Arguments",
) -> dict[int, Tensor] | None:
    """Returns a batch by the positions of a graph's inputs; None: it is of other sizes."""
    named: Mapping[Any, Any] = batch if isinstance(batch, Mapping) else arguments.named(batch)
    found = {}
    for i, place in places.items():
        name = arguments.key(place)
        if name is None or name not in named:
            by_name = isinstance(batch, Mapping)
            has = ", ".join(map(str, batch)) if by_name else f"{len(batch)} in order"
            raise OptionError(
                f"batch {number} of calibration has no {name!r}, which the model reads; it has "
                f"{has}. Give {HOW}."
            )
        value, expected = named[name], values[i]
        if not isinstance(value, Tensor) or not isinstance(expected, Tensor):
            return None
        if (value.dtype, value.shape) != (expected.dtype, expected.shape):
            return None
        found[i] = value
    return found


def _copy(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    with torch.inference_mode(False):
        return value.detach().clone()


def _hash(value: Any, digest: Any) -> None:
    if not isinstance(value, Tensor):
        digest.update(repr(value).encode())
        return
    digest.update(_kind(value).encode())
    digest.update(value.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
