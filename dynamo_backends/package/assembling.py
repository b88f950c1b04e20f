"""Makes a module of the contents of a package, in the process that saves and in others."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dynamo_backends.interface.backend import Backend
from dynamo_backends.interface.options import Options
from dynamo_backends.interface.registry import get_backend
from dynamo_backends.package.inputs import Arguments
from dynamo_backends.package.module import PackagedModule
from dynamo_backends.package.portable import Portable
from dynamo_backends.package.structure import decoded

EAGER = "eager"
"""The name of no backend: calls run one by one."""


@dataclass(frozen=True)
class Contents:
    """The parts of a package besides the executables.

    Attributes:
        name: Name of the model's class.
        backend: Name of the backend.
        options: Options of the backend, see `structure.encoded`.
        names: Names of the positional arguments.
        arguments: Structure of `(args, kwargs)`.
        results: Structure of what a call returns.
    """

    name: str
    backend: str
    options: Mapping[str, Any]
    names: Sequence[str]
    arguments: Mapping[str, Any]
    results: Mapping[str, Any]

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> "Contents":
        """Reads the contents from a manifest."""
        return cls(**{field.name: manifest[field.name] for field in dataclasses.fields(cls)})

    def parsed(self, backend: Backend) -> Options:
        """Returns the options; what is compiled is compiled while the caller waits."""
        return backend.Options.parse({**decoded(self.options), "while_compiling": "wait"},
                                     backend.name)  # fmt: skip


def assembled(
    contents: Contents,
    portable: Portable,
    weights: Sequence[Tensor],
    backend: Backend | None,
    notes: Sequence[str] = (),
) -> PackagedModule:
    """Builds a callable module from a package's graph, weights and backend.

    Args:
        contents: What the package says.
        portable: The graph.
        weights: Its first inputs.
        backend: What compiles it, or loads what it has; None: it runs in eager.
        notes: For `explain`.
    """
    run: Any = portable.in_eager
    reports: list[Any] = []
    if backend is not None:
        from dynamo_backends.pipeline.captured import compile_exported

        static = frozenset(range(len(portable.weights)))
        run, report = compile_exported(
            backend, portable.module, portable.facts, contents.parsed(backend), static
        )
        reports = [report]
    return PackagedModule(
        contents.name,
        contents.backend if backend is not None else EAGER,
        lambda: portable,
        weights,
        Arguments(contents.names, contents.arguments, portable.leaves, portable.given),
        contents.results,
        run,
        reports,
        notes,
    )


def backend_of(name: str) -> Backend | None:
    """Returns the backend of that name; None: eager.

    Raises:
        UnknownBackendError: There is none.
    """
    return None if name == EAGER else get_backend(name)
