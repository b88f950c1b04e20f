"""Lists the candidates: this package's backends, torch's, and those of other packages."""

import contextlib
import importlib.metadata
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends.autotune.options import EAGER, SPLIT, AutotuneOptions, default_candidates
from dynamo_backends.autotune.verification import autocast_bfloat16
from dynamo_backends.int8.options import NNCF, TORCHAO
from dynamo_backends.interface.backend import Backend
from dynamo_backends.interface.options import Options
from dynamo_backends.interface.packages import installed_versions
from dynamo_backends.interface.protocols import CompilesSteps, NamedBounds
from dynamo_backends.interface.registry import (
    ENTRY_POINT_GROUP,
    availability_of,
    get_backend,
    list_backends,
    package_versions,
    third_party_backends,
)
from dynamo_backends.pipeline.captured import compile_captured

REDUCED, INT8 = "@bf16", "@int8"
"""What is in the names of candidates that compute so; "@int8-weights" is a kind of the latter."""

Owner = Literal["eager", "ours", "torch", "third-party"]


# In bfloat16 by autocast: what cannot be told to compute so by an option.
_AUTOCAST = frozenset({EAGER, "inductor"})


@dataclass(frozen=True)
class Candidate:
    """One way to run a captured graph: a backend, and the precision it computes in.

    Attributes:
        name: Unique among the candidates: the backend's, and "@bf16" after it for one that
            computes in bfloat16, "@int8" and its kinds for one in int8.
        backend: Name of the backend.
        owner: Whose it is.
        made: The backend itself, if its name does not say it (see `SPLIT`).
    """

    name: str
    backend: str
    owner: Owner
    made: Backend | None = None

    @property
    def is_bfloat16(self) -> bool:
        """Returns whether the candidate computes in bfloat16 ("@bf16")."""
        return self.name.endswith(REDUCED)

    @property
    def is_int8(self) -> bool:
        """Returns whether the candidate computes in int8, or stores weights in int8."""
        return INT8 in self.name

    @property
    def trains(self) -> bool:
        """Returns whether the candidate compiles graphs that need gradients."""
        return self.owner != "ours" or (self.made or get_backend(self.backend)).trains

    @property
    def has_native_step_compiler(self) -> bool:
        """Returns whether the backend compiles training steps in its own way."""
        if self.owner != "ours":
            return self.backend == "inductor"
        return isinstance(get_backend(self.backend), CompilesSteps)

    def backend_options(
        self, options: AutotuneOptions, bounds: NamedBounds | None = None
    ) -> Options:
        """Makes the options of this package's backend from those of autotune.

        Args:
            options: Options of autotune.
            bounds: See `compile`.
        """
        if self.backend == SPLIT:
            return options
        settings = options.common_settings()
        kind = get_backend(self.backend).Options
        if "buckets" in kind.__dataclass_fields__:
            settings |= {"bucket_growth": 1} if bounds is None else {"buckets": bounds}
        if self.is_bfloat16 and "precision" in kind.__dataclass_fields__:
            settings["precision"] = "bf16"
        if self.is_int8:
            settings["precision"] = self.name.partition("@")[2]
            settings["calibration"], settings["tolerance"] = options.calibration, options.tolerance
        return kind.parse(settings, self.backend)

    def dependency_versions(self) -> str:
        """Returns the versions of the packages that its compiled code depends on."""
        if self.owner == "ours":
            backends = list_backends() if self.backend == SPLIT else [self.backend]
            packages = dict(package_versions(backends))
            if self.is_int8:
                packages |= installed_versions((*NNCF.values(), *TORCHAO.values()))
            return ", ".join(f"{n} {v}" for n, v in packages.items())
        if self.owner != "third-party":
            return ""
        points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=self.backend)
        found = [f"{p.value} {p.dist.name} {p.dist.version}" for p in points if p.dist]
        return ", ".join(found)

    def compile(
        self,
        captured: fx.GraphModule,
        example_inputs: Sequence[Any],
        options: AutotuneOptions,
        bounds: NamedBounds | None = None,
    ) -> Callable[..., Any]:
        """Compiles a graph that Dynamo captured; returns a function of its inputs.

        Args:
            captured: The graph; not changed.
            example_inputs: Its inputs.
            options: Options of autotune.
            bounds: Sizes that backends which round up leave as they are; None: all sizes.
        """
        with self._precision():
            copy = private.copy_captured(captured)
            run = self._compile(copy, example_inputs, options, bounds)
        if not self._by_autocast():
            return run
        dtypes = [_dtype(node) for node in _outputs(captured)]
        if self.owner == "eager":
            run = _in_autocast(run)
        return _casting(run, dtypes)

    def _compile(
        self,
        captured: fx.GraphModule,
        example_inputs: Sequence[Any],
        options: AutotuneOptions,
        bounds: NamedBounds | None,
    ) -> Callable[..., Any]:
        if self.owner == "eager":
            return captured.forward
        if self.owner == "ours":
            backend = self.made or get_backend(self.backend)
            given = self.backend_options(options, bounds)
            return compile_captured(backend, captured, example_inputs, given)
        compile_foreign = self._foreign()
        with private.keeping_unused_draws():
            return compile_foreign(captured, list(example_inputs))

    def _foreign(self) -> Callable[..., Any]:
        if self.owner == "torch":
            return private.lookup_backend(self.backend)
        (point, *_) = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=self.backend)
        return point.load()

    def _by_autocast(self) -> bool:
        return self.is_bfloat16 and self.backend in _AUTOCAST

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        return autocast_bfloat16() if self._by_autocast() else contextlib.nullcontext()


def _in_autocast(run: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with autocast_bfloat16():
            return run(*args)

    return call


def _casting(run: Callable[..., Any], dtypes: Sequence[Any]) -> Callable[..., Any]:
    """Wraps a function so that its results have the dtypes that Dynamo expects."""

    def call(*args: Any) -> list[Any]:
        return [
            r if d is None or not isinstance(r, Tensor) else r.to(d)
            for r, d in zip(run(*args), dtypes, strict=True)
        ]

    return call


def _outputs(captured: fx.GraphModule) -> Sequence[Any]:
    outputs: Any = captured.graph.output_node().args[0]
    return tuple(outputs)


def _dtype(node: Any) -> Any:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return getattr(value, "dtype", None)


def iter_candidates(options: AutotuneOptions, device_types: Sequence[str]) -> Iterator[Candidate]:
    """Yields the candidates that can run on these devices, without float32 eager.

    Args:
        options: Options of autotune.
        device_types: Of the inputs.
    """
    for name in options.candidates or default_candidates(device_types):
        owner = _owner(name)
        if owner == "eager":
            if options.precision == "bf16":
                yield Candidate(name + REDUCED, name, owner)
            continue
        if owner == "ours" and not _usable(name, device_types):
            continue
        yield Candidate(name, name, owner)
        if options.precision == "bf16" and _can_reduce(name, owner):
            yield Candidate(name + REDUCED, name, owner)
        if options.is_int8 and owner == "ours" and set(device_types) <= {"cpu"}:
            for kind in _precisions(name):
                if kind.startswith("int8"):
                    yield Candidate(f"{name}@{kind}", name, owner)


def _owner(name: str) -> Owner:
    if name == EAGER:
        return "eager"
    if name in list_backends():
        return "ours"
    return "third-party" if name in third_party_backends() else "torch"


def _usable(name: str, device_types: Sequence[str]) -> bool:
    found = availability_of(get_backend(name))
    return found.usable and (not found.devices or set(device_types) <= set(found.devices))


def _can_reduce(name: str, owner: Owner) -> bool:
    if name in _AUTOCAST:
        return True
    return owner == "ours" and "bf16" in _precisions(name)


def _precisions(name: str) -> tuple[str, ...]:
    """Returns the values that the option `precision` of a backend of this package may have."""
    hint = typing.get_type_hints(get_backend(name).Options).get("precision")
    return typing.get_args(hint)
