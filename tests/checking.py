"""Compares functions compiled by this package's backends with eager."""

from collections.abc import Callable
from typing import Any

from dynamo_backends import GraphReport
from dynamo_backends.conformance.comparing import aliases, assert_same, copy_inputs, tensors, widen
from dynamo_backends.conformance.subject import Subject

__all__ = ["aliases", "assert_same", "check", "copy_inputs", "tensors", "widen"]


def check(
    fn: Callable[..., Any],
    *inputs: Any,
    ops_in_eager: int | None = 0,
    fullgraph: bool = True,
    dynamic: bool | None = None,
    backend: str = "openxla",
    **options: Any,
) -> list[GraphReport]:
    """Compiles `fn` and compares one call with eager.

    Args:
        fn: Function or module.
        inputs: Its inputs; each side gets copies.
        ops_in_eager: How many operators may run in eager; None: any number.
        fullgraph: Whether Dynamo must capture it whole.
        dynamic: As for `torch.compile`.
        backend: Name of the backend.
        options: Of the backend.

    Returns:
        The reports of the compiled graphs.
    """
    subject = Subject(backend, options)
    with subject.watching() as reports:
        subject.check(fn, *inputs, fullgraph=fullgraph, dynamic=dynamic)
    assert reports, "nothing was compiled"
    if ops_in_eager is not None:
        eager = [f for r in reports for f in r.fallbacks]
        assert sum(f.count for f in eager) == ops_in_eager, eager
    assert not any(r.runtime_fallbacks for r in reports), reports
    return reports
