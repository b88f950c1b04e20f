"""Nested arguments, results and options in types that JSON has.

A node is `{"tuple": [...]}`, `{"list": [...]}`, `{"dict": [[key, node], ...]}` or `{"value": x}`
with a number, a text, a truth value or None.
"""

from collections.abc import Mapping
from typing import Any

from torch.utils import _pytree as pytree

from dynamo_backends.interface.errors import SaveError

_SCALARS = (bool, int, float, str, type(None))


def encoded(value: Any, what: str) -> dict[str, Any]:
    """A nested value as a node. Other mappings become dicts, and named tuples become tuples.

    Args:
        value: Nested in lists, tuples and mappings.
        what: It is, for the text of the error.

    Raises:
        SaveError: It holds an object of another class.
    """
    if isinstance(value, Mapping):
        return {"dict": [[_key(k, what), encoded(v, what)] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [encoded(v, what) for v in value]}
    if isinstance(value, _SCALARS):
        return {"value": value}
    raise SaveError(
        f"a package cannot hold {what} with a {type(value).__qualname__}: valid are tensors and "
        "numbers in lists, tuples and dicts. Wrap the model in a module whose forward takes and "
        "returns those."
    )


def _key(key: Any, what: str) -> Any:
    if isinstance(key, str | int):
        return key
    raise SaveError(f"a package cannot hold {what} with the key {key!r}; use texts or integers.")


def decoded(node: Mapping[str, Any]) -> Any:
    """Returns the nested value of a node.

    Raises:
        ValueError: It is no node.
    """
    (kind, content), *others = node.items()
    if others or kind not in ("dict", "list", "tuple", "value"):
        raise ValueError(f"not a node: {list(node)}")
    if kind == "dict":
        return {key: decoded(inner) for key, inner in content}
    if kind == "value":
        return content
    values = map(decoded, content)
    return list(values) if kind == "list" else tuple(values)


def numbered(spec: Any, what: str) -> dict[str, Any]:
    """A structure of torch's pytrees as a node whose values are the numbers of the leaves."""
    return encoded(pytree.tree_unflatten(list(range(spec.num_leaves)), spec), what)
