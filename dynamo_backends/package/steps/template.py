"""Nested values with places for tensors and numbers: states, arguments and results of a step.

A node is one of `structure`'s, whose innermost nodes may also be places: `{kind: position}`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dynamo_backends.interface.errors import PackageError, SaveError

TENSOR, NUMBER = "tensor", "number"
OUTPUT = "output"

_PLACES = frozenset((TENSOR, NUMBER, OUTPUT))
_SCALARS = (bool, int, float, str, type(None))

Node = Mapping[str, Any]
Found = tuple[str, int, Any, str]
"""A place: its kind and position, the value given for it, and where it was found."""


def made(value: Any, place_of: Callable[[Any], Node | None], what: str) -> dict[str, Any]:
    """Returns a value as a node. Mappings become dicts, named tuples become tuples.

    Args:
        value: Nested in lists, tuples and mappings.
        place_of: The place for what is inside; None: it is no place.
        what: It is, for the text of the error.

    Raises:
        SaveError: It holds an object of another class.
    """
    place = place_of(value)
    if place is not None:
        return dict(place)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str | int):
                raise SaveError(f"a file cannot hold {what} with the key {key!r}")
        return {"dict": [[k, made(v, place_of, what)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [made(v, place_of, what) for v in value]}
    if type(value) in _SCALARS:
        return {"value": value}
    raise SaveError(
        f"a file cannot hold {what} with a {type(value).__qualname__}: valid are tensors and "
        "numbers in lists, tuples and dicts."
    )


def filled(node: Node, value_of: Callable[[str, int], Any]) -> Any:
    """Returns the value of a node.

    Args:
        node: From `made`.
        value_of: The value for a place, by kind and position.
    """
    ((kind, content),) = node.items()
    if kind == "dict":
        return {key: filled(inner, value_of) for key, inner in content}
    if kind in ("list", "tuple"):
        values = [filled(inner, value_of) for inner in content]
        return values if kind == "list" else tuple(values)
    return value_of(kind, content) if kind in _PLACES else content


def matched(node: Node, value: Any, where: str) -> Iterator[Found]:
    """What a value has at the places of a node.

    Args:
        node: From `made`.
        value: Nested in the same way.
        where: What the value is called.

    Raises:
        PackageError: It is nested otherwise, or differs where there is no place.
    """
    ((kind, content),) = node.items()
    if kind in _PLACES:
        yield kind, content, value, where
    elif kind == "dict":
        if not isinstance(value, Mapping):
            raise PackageError(f"{where} has to be a mapping, not a {type(value).__name__}")
        _check_keys([key for key, _ in content], value, where)
        for key, inner in content:
            yield from matched(inner, value[key], f"{where}[{key!r}]")
    elif kind in ("list", "tuple"):
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != len(content):
            raise PackageError(f"{where} has to be a {kind} of {len(content)} values")
        for i, inner in enumerate(content):
            yield from matched(inner, value[i], f"{where}[{i}]")
    elif type(value) is not type(content) or value != content:
        raise PackageError(
            f"{where} is {_text(value)}, and the step was saved for {content!r}. The function's "
            "Python does not run in a loaded step, so what it makes of other values is unknown. "
            "Save a step that gets a tensor there, such as torch.tensor(0.5)"
        )


def _check_keys(known: Sequence[Any], value: Mapping[Any, Any], where: str) -> None:
    lacks, more = [k for k in known if k not in value], [k for k in value if k not in set(known)]
    if lacks or more:
        words = [f"lacks {lacks[:5]}" if lacks else "", f"has {more[:5]} more" if more else ""]
        raise PackageError(f"{where} {' and '.join(filter(None, words))}")


def _text(value: Any) -> str:
    return repr(value) if type(value) in _SCALARS else f"a {type(value).__name__}"
