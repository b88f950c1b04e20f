"""`load_step`: a callable training step from a file."""

import functools
import json
import os
import time
import warnings
from collections.abc import Mapping
from typing import Any

from dynamo_backends.aot.step.program.backends import StepBackend, step_backend
from dynamo_backends.aot.step.program.programs import CopyingProgram
from dynamo_backends.aot.step.program.verified import VerifiedStep
from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface import protocols
from dynamo_backends.interface.backend import Backend
from dynamo_backends.interface.counters import track_executable
from dynamo_backends.interface.errors import (
    CompileError,
    DynamoBackendsError,
    FallbackRefusedError,
    PackageError,
    brief_error,
    suppress_and_log,
)
from dynamo_backends.interface.executable import StepProgram
from dynamo_backends.interface.publishing import publish
from dynamo_backends.interface.registry import availability_of
from dynamo_backends.interface.report import Compilation, GraphReport
from dynamo_backends.package.archive import Archive
from dynamo_backends.package.assembling import packaged
from dynamo_backends.package.loading import GRAPH, STEP, read_weights
from dynamo_backends.package.machine import described, differences
from dynamo_backends.package.steps.described import Described, inner_of, parsed
from dynamo_backends.package.steps.loaded import LoadedStep
from dynamo_backends.package.structure import decoded


def load_step(path: str | os.PathLike[str], *, strict: bool = False) -> LoadedStep:
    """Loads a training step that `Step.save` has written.

    It needs neither the function nor the model's class, and on the kind of machine where it was
    saved, with the same versions, no compiler. Elsewhere the backend compiles the portable form,
    and where it cannot run, the portable form runs call by call; one warning says so.

    A file contains machine code: load only files that you trust. Nothing is unpickled.

    Examples:
        >>> step.save("step.dbp")
        >>> loaded = dynamo_backends.load_step("step.dbp")
        >>> loaded.param_groups[0]["lr"] = 0.01
        >>> loss = loaded(images, labels)
        >>> model.load_state_dict(loaded.state_dict()["model"])

    Args:
        path: Path of the file.
        strict: Refuse instead of compiling or running call by call.

    Returns:
        The step, with the state that it was saved with.

    Raises:
        PackageError: The file is damaged, has a model, this torch cannot read it, or `strict`
            forbids what would have to be done.
        FallbackRefusedError: It would run call by call, and it was saved with `fallback="error"`.
    """
    with Archive(path) as archive:
        try:
            return _loaded(archive, strict)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise PackageError(f"{path} has an invalid manifest: {brief_error(error)}") from error


def _loaded(archive: Archive, strict: bool) -> LoadedStep:
    manifest = archive.manifest
    if manifest.get("kind") != STEP:
        raise PackageError(f"{archive.path} contains a model. Use dynamo_backends.load.")
    found = Described.of(manifest, json.loads(archive.read(GRAPH)))
    names = [(f"tensor_{i}", spec) for i, spec in enumerate(found.living)]
    # The weights are parts of one memory, and each is to be updated by itself.
    tensors = [spec.empty().copy_(tensor) for tensor, (_, spec) in
               zip(read_weights(archive, names), names, strict=True)]  # fmt: skip
    start = time.perf_counter()
    make = _Making(archive, found, strict)
    report = GraphReport(make.backend, "step", executables=1, blocks=1)
    report.ops_on_backend = len(found.targets)
    loaded = LoadedStep(found, tensors, report, manifest["notes"])
    loaded.machine = manifest["machine"]
    make.program(loaded, report)
    report.cache_hits = int(loaded.program.from_disk)
    seconds = time.perf_counter() - start
    report.note_compilation(Compilation((), 1, report.cache_hits, seconds))
    with suppress_and_log(report, "publishing a report"):
        publish(report)
    return loaded


class _Making:
    """Decides what takes the steps of a file.

    Args:
        archive: The file.
        described: What it says.
        strict: See `load_step`.

    Attributes:
        backend: Name of what runs the graph.
    """

    def __init__(self, archive: Archive, described_: Described, strict: bool):
        self._archive = archive
        self._described = described_
        self._strict = strict
        self.backend: str = archive.manifest["backend"]
        self._options: Mapping[str, Any] = archive.manifest["options"]

    def program(self, step: LoadedStep, report: GraphReport) -> None:
        """Gives a step its program."""
        inner = inner_of(self.backend)
        if inner is None:
            step.program = _call_by_call(self._described.whole())
            return
        reason = self._reason(inner)
        if not reason:
            try:
                step.program = self._from_file(inner)
            except CompileError as error:
                reason = brief_error(error)
        if reason and self._strict:
            raise PackageError(
                f"the executable in {self._archive.path} cannot be used: {reason}. strict=True "
                "does not allow compiling it again. Save the step on this machine."
            )
        if reason:
            try:
                step.program = self._backend.compile(self._described.whole())
                self._tell("was compiled again from its portable graph", reason)
            except DynamoBackendsError as error:
                if parsed(inner, self._options).fallback == "error":
                    raise FallbackRefusedError(
                        f"{self._archive.path} was saved with fallback='error', but {self.backend} "
                        f"cannot compile it on this machine: {reason}; {brief_error(error)}"
                    ) from error
                step.program = _call_by_call(self._described.whole())
                step.backend = report.backend = "aot_eager"
                self._tell("runs in eager, operator by operator", f"{reason}; {brief_error(error)}")
        track_executable(step.program)
        step.program.set_report(report)
        if step.backend == self.backend:
            self._compare(step, report)

    def _reason(self, inner: Backend) -> str:
        """Returns why the executables of the file cannot be used; empty: they can."""
        inner = packaged(inner)
        available = availability_of(inner)
        if not available.usable:
            return f"{inner.name} cannot run here: {available.reason}"
        manifest = self._archive.manifest
        if not manifest["executables"]:
            return f"the package contains no executable of {inner.name}"
        here = described(inner, parsed(inner, self._options))
        return "; ".join(differences(manifest["machine"], here))

    def _from_file(self, inner: Backend) -> StepProgram:
        (entry,) = self._archive.manifest["executables"]
        parts = {name: self._archive.read(part) for name, part in entry["parts"].items()}
        graph, inner = self._described.without_calls(), packaged(inner)
        assert isinstance(inner, protocols.SavesSteps), inner
        made = inner.load_step(parts, graph, parsed(inner, self._options))
        made.from_disk = True
        return made

    def _compare(self, step: LoadedStep, report: GraphReport) -> None:
        """Steps are compared with eager: what was compiled here once, and all if that was asked."""
        inner = inner_of(self.backend)
        verify = "off" if inner is None else parsed(inner, self._options).verify
        if step.program.from_disk and verify != "always":
            return  # it was compared when it was saved; `_backend` may need a compiler
        backend = self._backend
        if backend.verify in ("always", "first"):
            step.program = VerifiedStep(
                step.program, self._described.whole(), report,
                lambda settled: setattr(step, "program", settled),
                always=backend.verify == "always", strict=backend.strict, reduced=backend.reduced,
            )  # fmt: skip

    @functools.cached_property
    def _backend(self) -> StepBackend:
        return step_backend(self.backend, decoded(self._options))

    def _tell(self, what: str, reason: str) -> None:
        warnings.warn(f"{self._archive.path} {what}: {reason}", UserWarning, stacklevel=5)


def _call_by_call(graph: Graph) -> StepProgram:
    module = graph.module
    return CopyingProgram(graph, lambda inputs: module.forward(*inputs))
