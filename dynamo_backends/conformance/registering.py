"""Tables of checks, filled by decorators."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from dynamo_backends.conformance.subject import Subject

Check = Callable[[Subject], None]


class Table(dict[str, Check]):
    """A table of checks by name, filled by decorators."""

    def add(self, function: Check) -> Check:
        """As a decorator: a check of the function's name, with spaces."""
        self[_name(function)] = function
        return function

    def each(
        self, cases: Mapping[str, Any]
    ) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """As a decorator: a check for each case, whose value is the second argument."""

        def add(function: Callable[..., None]) -> Callable[..., None]:
            for name, value in cases.items():
                self[f"{_name(function)}: {name}"] = functools.partial(function, value=value)
            return function

        return add


def _name(function: Callable[..., None]) -> str:
    return function.__name__.replace("_", " ")
