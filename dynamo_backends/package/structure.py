"""Nested arguments, results, states and options in types that JSON has.

A node is `{"tuple": [...]}`, `{"list": [...]}`, `{"dict": [[key, node], ...]}` or `{"value": x}`
with a number, a text, a truth value or None. Those of training steps also have places for tensors
and numbers, `{kind: position}`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils import _pytree as pytree

from dynamo_backends.interface.errors import PackageError, SaveError

TENSOR, NUMBER, OUTPUT = "tensor", "number", "output"
_PLACES = frozenset((TENSOR, NUMBER, OUTPUT))
_SCALARS = (bool, int, float, str, type(None))

Node = Mapping[str, Any]
Found = tuple[str, int, Any, str]
"""A place: its kind and position, the value given for it, and where it was found."""

_VALID = "supported are tensors and numbers in lists, tuples and dicts"
_MODEL = "Wrap the model in a module whose forward takes and returns only these types."


def encoded(
    value: Any, what: str, place_of: Callable[[Any], Node | None] | None = None
) -> dict[str, Any]:
    """A nested value as a node. Other mappings become dicts, and named tuples become tuples.

    Args:
        value: Nested in lists, tuples and mappings.
        what: It is, for the text of the error.
        place_of: The place for what is inside; None: it is no place.

    Raises:
        SaveError: It holds an object of another class.
    """
    place = None if place_of is None else place_of(value)
    if place is not None:
        return dict(place)
    if isinstance(value, Mapping):
        return {"dict": [[_key(k, what), encoded(v, what, place_of)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [encoded(v, what, place_of) for v in value]}
    if isinstance(value, _SCALARS):
        return {"value": value}
    text = f"a package cannot contain {what} with a {type(value).__qualname__}: {_VALID}."
    raise SaveError(text if place_of is not None else f"{text} {_MODEL}")


def _key(key: Any, what: str) -> Any:
    if isinstance(key, str | int):
        return key
    raise SaveError(
        f"a package cannot contain {what} with the key {key!r}. Use strings or integers as keys."
    )


def decoded(node: Node, value_of: Callable[[str, int], Any] | None = None) -> Any:
    """Returns the nested value of a node.

    Args:
        node: From `encoded`.
        value_of: The value for a place, by kind and position; None: it has no places.

    Raises:
        ValueError: It is no node.
    """
    (kind, content), *others = node.items()
    if not others and kind in _PLACES and value_of is not None:
        return value_of(kind, content)
    if others or kind not in ("dict", "list", "tuple", "value"):
        raise ValueError(f"not a node: {list(node)}")
    if kind == "dict":
        return {key: decoded(inner, value_of) for key, inner in content}
    if kind == "value":
        return content
    values = [decoded(inner, value_of) for inner in content]
    return values if kind == "list" else tuple(values)


def numbered(spec: Any, what: str) -> dict[str, Any]:
    """Encodes a pytree spec as a node whose leaves are numbered."""
    return encoded(pytree.tree_unflatten(list(range(spec.num_leaves)), spec), what)


def match_leaves(node: Node, value: Any, where: str) -> Iterator[Found]:
    """Yields the leaves of a value at a node's places; checks that its structure fits.

    Args:
        node: From `encoded`.
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
            yield from match_leaves(inner, value[key], f"{where}[{key!r}]")
    elif kind in ("list", "tuple"):
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != len(content):
            raise PackageError(f"{where} has to be a {kind} of {len(content)} values")
        for i, inner in enumerate(content):
            yield from match_leaves(inner, value[i], f"{where}[{i}]")
    elif type(value) is not type(content) or value != content:
        raise PackageError(
            f"{where} is {_text(value)}, but the step was saved for {content!r}. The Python code "
            "of the function does not run in a loaded step, so other values are not supported. "
            "Save a step that gets a tensor there, such as torch.tensor(0.5)."
        )


def _check_keys(known: Sequence[Any], value: Mapping[Any, Any], where: str) -> None:
    lacks, more = [k for k in known if k not in value], [k for k in value if k not in set(known)]
    if lacks or more:
        words = [
            f"lacks {lacks[:5]}" if lacks else "",
            f"has unexpected {more[:5]}" if more else "",
        ]
        raise PackageError(f"{where} {' and '.join(filter(None, words))}")


def _text(value: Any) -> str:
    return repr(value) if type(value) in _SCALARS else f"a {type(value).__name__}"
