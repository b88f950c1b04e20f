"""What takes the place of functions of torch at which transforms of `torch.func` begin."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from dynamo_backends._torch_private.functorch import (
    DUAL_LEVELS,
    GRADIENTS,
    NESTINGS,
    OTHERS,
    PULLBACKS,
)
from dynamo_backends.aot.step.record.active_session import active_session, open_transforms
from dynamo_backends.aot.step.record.session import Session


def _before_transform() -> Session | None:
    """Returns the call of a step that begins a transform now, in code of the user's."""
    session = active_session()
    return session if session is not None and session.is_innermost else None


def _region() -> contextlib.AbstractContextManager[Any]:
    session = _before_transform()
    return contextlib.nullcontext() if session is None else session.transforms.region()


def _nesting(original: Any, name: str) -> Callable[..., Any]:
    @contextlib.contextmanager
    def nesting(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with _region(), original(*args, **kwargs) as level:
            yield level

    return nesting


def _differentiating(original: Any, name: str) -> Callable[..., Any]:
    def autograd_grad(*args: Any, **kwargs: Any) -> Any:
        with _region():
            return original(*args, **kwargs)

    return autograd_grad


def _pulling_back(original: Any, name: str) -> Callable[..., Any]:
    def vjp(*args: Any, **kwargs: Any) -> Any:
        session = _before_transform()
        result = original(*args, **kwargs)
        if session is not None:
            session.transforms.add_pullback(result[1])
        return result

    return vjp


def _eager(original: Any, name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        session, transforms = _before_transform(), open_transforms()
        reason = "uses a transform of functions that no program of a step holds"
        if session is not None:
            session.go_eager(reason)
        elif transforms is not None:
            transforms.refuse(reason)
        return original(*args, **kwargs)

    return call


def _forwards(original: Any, name: str) -> Callable[..., Any]:
    def enter_dual_level() -> Any:
        session = _before_transform()
        if session is not None:
            session.go_eager("uses torch.autograd.forward_ad")
        return original()

    return enter_dual_level


TRANSFORM_PATCHES = (
    (NESTINGS, _nesting), (GRADIENTS, _differentiating), (PULLBACKS, _pulling_back),
    (OTHERS, _eager), (DUAL_LEVELS, _forwards),
)  # fmt: skip
"""Functions of torch at which transforms begin, each with what makes its replacement."""
