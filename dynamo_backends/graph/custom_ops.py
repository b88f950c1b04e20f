"""Operators of the library `dynamo_backends`: each is called instead of one of ATen's."""

from collections.abc import Callable, Collection
from typing import Any

import torch

NAMESPACE = "dynamo_backends"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def register_op_like(
    name: str, like: Any, kernel: Callable[..., Any], tags: Collection[torch.Tag] = ()
) -> Any:
    """Registers an operator with the schema of an ATen operator; returns its overload.

    Args:
        name: Name of the operator.
        like: An operator of ATen's that has the schema.
        kernel: Computes it, by calling other operators.
        tags: What torch and Inductor are told of it.
    """
    _, _, signature = str(like._schema).partition("(")
    _library.define(f"{name}({signature}", tags=tuple(tags))
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def register_op(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Registers a CPU operator with a fake kernel in `dynamo_backends`.

    Args:
        schema: As torch writes it, without the namespace.
        kernel: Computes it.
        fake: Makes an empty result, of fake tensors.
    """
    _library.define(schema)
    name = schema.partition("(")[0]
    _library.impl(name, kernel, "CPU")
    _library.impl(name, fake, "Meta")
    return getattr(getattr(torch.ops, NAMESPACE), name).default
