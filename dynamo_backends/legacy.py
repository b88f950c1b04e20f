"""Compilers under the backend names that were in use before.

`torch.compile(backend=name)` knows all of them (see `legacy_names`).

`python -m dynamo_backends.legacy` prints a table of them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from dynamo_backends._torch_private import lookup_backend
from dynamo_backends.interface.compiler import compiler
from dynamo_backends.interface.registry import (
    OLD_BY_NAME,
    OLD_NAMES,
    OldName,
    log_legacy_name,
    resolve_legacy_name,
)


class OldCompiler:
    """Stands for an old name in `torch.compile(backend=name)`; the living backend does the work."""

    _tags: tuple[str, ...] = ()

    def __init__(self, old: OldName):
        self.__name__ = old.name
        self._old = old

    def __call__(
        self, captured: Any, example_inputs: Sequence[Any], **settings: Any
    ) -> Callable[..., Any]:
        """Compiles what Dynamo captured.

        Raises:
            UnknownBackendError: No backend stands for the name; the message says why.
        """
        if self._old.owner != "torch":
            return compiler(str(resolve_legacy_name(self._old.name)))(
                captured, example_inputs, **settings
            )
        log_legacy_name(self._old)
        return lookup_backend(self._old.target)(captured, example_inputs, **settings)


@functools.cache
def old_compiler(name: str) -> OldCompiler:
    """Returns the one object that stands for an old name."""
    return OldCompiler(OLD_BY_NAME[name])


def __getattr__(name: str) -> OldCompiler:
    """Entry points name `dynamo_backends.legacy:<old name>`."""
    if name in OLD_BY_NAME:
        return old_compiler(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def entry_points() -> list[str]:
    """The names for which this module has an entry point: those that no living backend bears."""
    return [old.name for old in OLD_NAMES if old.name != old.target]


def document() -> str:
    """Returns the table of all old names, in Markdown."""
    rows = [
        f"| `{old.name}` | {f'`{old.target}`' if old.target else 'none'} | {_whose(old)} "
        f"| {old.why} |"
        for old in OLD_NAMES
    ]
    return _HEAD + "\n".join(rows) + "\n"


def _whose(old: OldName) -> str:
    return {"here": "this package", "torch": "torch", "nobody": ""}[old.owner]


_HEAD = """# Old names

Which backend replaces a former name of `torch.compile(backend=...)`. TorchDynamo began with some
forty backends, and lists elsewhere still offer their names (such as `DynamoBackend` of Hugging
Face's accelerate). Each name below still works: it resolves to the backend that replaces it, and
one log line says which. A name without a replacement raises an error that says why. Names that
torch itself registers are left to torch.

| name | today | whose | what became of it |
|---|---|---|---|
"""

if __name__ == "__main__":
    print(document(), end="")
