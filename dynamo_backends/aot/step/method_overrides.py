"""Methods that are others for a while."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def override_method(owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Inside: `owner.name(...)` calls `replacement(original, ...)`."""
    original = getattr(owner, name)
    had, before = name in vars(owner), vars(owner).get(name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    # Learning rate schedulers look for this on the method.
    vars(call).update(vars(getattr(original, "__func__", original)))
    vars(owner)[name] = call
    try:
        yield
    finally:
        if had:
            vars(owner)[name] = before
        else:
            del vars(owner)[name]
