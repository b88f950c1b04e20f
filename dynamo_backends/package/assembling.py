"""Makes a module of the contents of a package, in the process that saves and in others."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dynamo_backends.interface.backend import Backend
from dynamo_backends.interface.options import Options
from dynamo_backends.interface.registry import get_backend, import_attribute
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


_APART = {"inductor": "dynamo_backends.inductor.backend:Inductor"}
"""Backends for packages alone: torch.compile has torch's of that name."""

_PACKAGED = {
    "inductor": "dynamo_backends.inductor.packaged:PackagedInductor",
    "inductor_freezing": "dynamo_backends.inductor.packaged:PackagedInductorFreezing",
    "inductor_max_autotune": "dynamo_backends.inductor.packaged:PackagedInductorMaxAutotune",
}
"""What compiles for packages, and loads from them, where that is not the backend itself."""

WITH_KERNELS = ("inductor_freezing", "inductor_max_autotune")
"""Backends with kernels of this package, which are compiled where they run."""


def backend_of(name: str) -> Backend | None:
    """Returns the backend of that name; None: eager.

    Raises:
        UnknownBackendError: There is none.
    """
    if name in _APART:
        backend: Backend = import_attribute(_APART[name])()
        return backend
    return None if name == EAGER else get_backend(name)


def packaged(backend: Backend) -> Backend:
    """Returns what compiles a backend's executables for packages, and loads them."""
    if backend.name not in _PACKAGED:
        return backend
    made: Backend = import_attribute(_PACKAGED[backend.name])()
    return made


def compiler_of(name: str) -> str:
    """Returns what makes the executables in packages of a backend, for people."""
    return "AOTInductor" if name in _PACKAGED else name


def loads_alone(name: str) -> bool:
    """Returns whether executables in packages of a backend load where it cannot compile."""
    return name in _PACKAGED
