"""Hooks that a user has registered for all modules or optimizers."""

from itertools import chain
from typing import Any

from dynamo_backends._torch_private import tables_of_global_hooks
from dynamo_backends.runtime import freezing


def has_global_hooks() -> bool:
    """Returns whether the user has hooks of all modules or optimizers of the process.

    Frozen weights have one of this package (`runtime.freezing`): a program of a step counts the
    versions of what it updates, which tells them as well.
    """
    if not any(_GLOBAL_HOOKS):
        return False
    hooks = chain.from_iterable(map(dict.values, _GLOBAL_HOOKS))
    return any(getattr(hook, "__module__", None) != freezing.__name__ for hook in hooks)


_GLOBAL_HOOKS: Any = tables_of_global_hooks()
