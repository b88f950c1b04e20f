"""Calls of a model that `dynamo-backends explain --traffic` reads from a file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dynamo_backends.bench.factories import Loaded
from dynamo_backends.capture.precompile import resized
from dynamo_backends.interface.errors import ModelError

FORM = '{"model": "torchvision:resnet18", "calls": [[[1, 3, 224, 224]], [[2, 3, 224, 224]]]}'


@dataclass(frozen=True)
class Traffic:
    """What a file says.

    Attributes:
        model: As for `cli.models.load`; empty if the file names none.
        calls: For each call the shapes of its tensors, in order or by the names of arguments.
    """

    model: str
    calls: tuple[Any, ...]


def read(path: Path) -> Traffic:
    """Reads a file.

    Raises:
        ModelError: It cannot be read, or has another form; the message says which.
    """
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    calls = given.get("calls") if isinstance(given, dict) else None
    if not isinstance(calls, list) or not calls or not all(map(_is_call, calls)):
        raise ModelError(f"{path} must have the form {FORM}.")
    return Traffic(str(given.get("model", "")), tuple(calls))


def arguments(loaded: Loaded, call: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the model's own arguments, repeated or cut to the shapes of a call.

    Args:
        loaded: The model and the arguments of one call.
        call: An entry of `Traffic.calls`.

    Raises:
        ModelError: The shapes do not fit the arguments.
        OptionError: A tensor has another number of dimensions.
    """
    args, kwargs = list(loaded.args), dict(loaded.kwargs)
    places: list[tuple[Any, Any]] = [
        *((args, i) for i, x in enumerate(args) if isinstance(x, Tensor)),
        *((kwargs, k) for k, x in kwargs.items() if isinstance(x, Tensor)),
    ]
    shapes: Mapping[Any, Any] = (
        call if isinstance(call, Mapping) else dict(enumerate(call))  # in the order of `places`
    )
    known = {key if isinstance(call, Mapping) else i: (of, key)
             for i, (of, key) in enumerate(places)}  # fmt: skip
    for name, shape in shapes.items():
        if name not in known:
            raise ModelError(
                f"a call gives a shape for {name!r}; the model's example has tensors at "
                f"{list(known)}."
            )
        of, key = known[name]
        of[key] = resized(of[key], shape)
    return tuple(args), kwargs


def _is_call(call: Any) -> bool:
    if not isinstance(call, list | dict):
        return False
    shapes = list(call.values() if isinstance(call, dict) else call)
    return all(isinstance(s, list) and all(map(_is_size, s)) for s in shapes)


def _is_size(number: Any) -> bool:
    return isinstance(number, int) and number >= 0
