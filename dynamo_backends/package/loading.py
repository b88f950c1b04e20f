"""`load`: a callable module from a package."""

import functools
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from dynamo_backends.interface.backend import Backend
from dynamo_backends.interface.errors import (
    CompileError,
    DynamoBackendsError,
    FallbackRefusedError,
    PackageError,
    brief_error,
)
from dynamo_backends.interface.registry import availability_of
from dynamo_backends.package import linked
from dynamo_backends.package import weights as stored
from dynamo_backends.package.archive import MAPPED, Archive
from dynamo_backends.package.assembling import (
    Contents,
    assembled,
    backend_of,
    loads_alone,
    packaged,
)
from dynamo_backends.package.machine import described, differences
from dynamo_backends.package.module import PackagedModule, Source
from dynamo_backends.package.packaged import InMemoryParts, PackageBackend
from dynamo_backends.package.portable import Portable, from_dict
from dynamo_backends.package.spec import Spec

log = logging.getLogger("dynamo_backends")

GRAPH, WEIGHTS, EXAMPLES = "graph.json", "weights.safetensors", "examples.safetensors"

STEP = "training step"
"""The kind of a package that `load_step` loads; others name none."""


def load(
    path: str | os.PathLike[str],
    *,
    strict: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
) -> PackagedModule:
    """Loads a model that `save` has written. It needs neither the model's class nor a compiler.

    On the kind of machine where it was saved, with the same versions, nothing is captured or
    compiled. Elsewhere the backend compiles the portable form, and where it cannot run, the
    portable form runs in eager; one warning says so.

    A package contains machine code: load only packages that you trust. Nothing is unpickled.

    Args:
        path: Path of the file.
        strict: Refuse instead of compiling or running in eager.
        checkpoint: The safetensors file that has the weights, if the package was saved with one;
            by default the file of that name beside the package.

    Returns:
        The model; calls have the arguments and results that it was saved with.

    Raises:
        PackageError: The file is damaged or no package, its checkpoint is missing or another one,
            this torch cannot read it, or `strict` forbids what would have to be done.
        FallbackRefusedError: Something would run in eager, and it was saved with
            `fallback="error"`.
    """
    with Archive(path) as archive:
        try:
            module = _loaded(archive, strict, checkpoint)
            place = None if checkpoint is None else os.path.abspath(checkpoint)
            module.machine = archive.manifest["machine"]
            module.forms = tuple(archive.manifest.get("forms", ()))
            module.source = Source(os.path.abspath(path), archive.digest, strict, place)
            return module
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise PackageError(f"{path} has an invalid manifest: {brief_error(error)}") from error


def load_again(source: Source) -> PackagedModule:
    """Loads the package that a pickled module names.

    Raises:
        PackageError: There is none any more, or another one.
    """
    with Archive(source.path) as archive:
        if archive.digest != source.digest:
            raise PackageError(
                f"{source.path} is not the package that the pickled module was loaded from. Load "
                "the new package with dynamo_backends.load."
            )
    return load(source.path, strict=source.strict, checkpoint=source.checkpoint)


def _loaded(
    archive: Archive, strict: bool, checkpoint: str | os.PathLike[str] | None
) -> PackagedModule:
    manifest = archive.manifest
    if manifest.get("kind") == STEP:
        raise PackageError(
            f"{archive.path} contains a training step. Use dynamo_backends.load_step."
        )
    contents = Contents.of(manifest)
    archive.read_ahead(WEIGHTS)
    graph = archive.read(GRAPH)
    make = functools.cache(lambda: from_dict(json.loads(graph)))
    backend, reason = _usable(archive, contents, strict)
    if isinstance(backend, PackageBackend):
        try:
            module = _linked(archive, contents, make, backend, checkpoint)
            if module is not None:
                return module
        except CompileError as error:
            backend, reason = _elsewhere(archive, contents, strict, [brief_error(error)])
    portable = make()
    places = portable.places[: len(portable.weights)]
    specs = (Spec.of(place.meta["val"]) for place in places)
    weights = read_weights(archive, zip(portable.weights, specs, strict=True), checkpoint)
    try:
        module = assembled(contents, portable, weights, backend, manifest["notes"])
    except FallbackRefusedError:
        raise
    except DynamoBackendsError as error:
        backend, reason = None, f"{contents.backend} cannot compile it on this machine: {error}"
        module = assembled(contents, portable, weights, None, manifest["notes"])
    if reason:
        what = "runs in eager" if backend is None else "was compiled again from its portable graph"
        text = f"{archive.path} {what}: {reason}"
        if strict:
            raise PackageError(
                f"{text}. strict=True does not allow this. Save the model on this machine."
            )
        warnings.warn(text, UserWarning, stacklevel=3)
    return module


def _linked(
    archive: Archive,
    contents: Contents,
    portable: Callable[[], Portable],
    backend: PackageBackend,
    checkpoint: str | os.PathLike[str] | None,
) -> PackagedModule | None:
    """A module without its graph; None: the package has no linked program, or it cannot be used.

    Raises:
        CompileError: The system's loader refuses code that needs no other package.
    """
    record = archive.manifest["linked"]
    if record is None:
        return None
    weights = read_weights(archive, linked.weight_specs(record), checkpoint)
    notes = archive.manifest["notes"]
    try:
        return linked.linked(record, contents, portable, weights, backend, notes)
    except Exception as error:  # the graph tells what is wrong, or does
        log.debug("a linked program cannot be used", exc_info=True)
        if isinstance(error, CompileError) and loads_alone(contents.backend):
            raise
        return None


def _usable(archive: Archive, contents: Contents, strict: bool) -> tuple[Backend | None, str]:
    """Returns what runs the graph, and why that is not what was saved; empty if it is."""
    manifest = archive.manifest
    inner = backend_of(contents.backend)
    if inner is None:
        return None, ""
    found: list[str] = []
    if manifest["executables"] and (loads_alone(inner.name) or availability_of(inner).usable):
        saved = packaged(inner)
        found = differences(manifest["machine"], described(saved, contents.parsed(saved)))
        if not found:
            return _keeping(archive, saved, strict), ""
    return _elsewhere(archive, contents, strict, found)


def _elsewhere(
    archive: Archive, contents: Contents, strict: bool, found: Sequence[str]
) -> tuple[Backend | None, str]:
    """Returns what runs the portable form, and why; empty if nothing else was saved.

    Args:
        archive: The package.
        contents: Of it.
        strict: See `load`.
        found: Why its executables cannot be used here.

    Raises:
        PackageError: `strict` forbids it.
    """
    inner = backend_of(contents.backend)
    assert inner is not None
    available = availability_of(inner)
    if not available.usable:
        remedy = f" ({available.remedy})" if available.remedy else ""
        reason = f"{contents.backend} cannot run here: {available.reason}{remedy}"
        return None, "; ".join([*found, reason])
    if not archive.manifest["executables"]:
        return inner, f"the package contains no executables of {contents.backend}" if strict else ""
    if strict:
        raise PackageError(
            f"{archive.path} was saved for another machine: {'; '.join(found)}. strict=True "
            "does not allow compiling it again. Save the model on this machine."
        )
    return inner, "; ".join(found)


def _keeping(archive: Archive, inner: Backend, strict: bool) -> PackageBackend:
    """Returns a backend with the executables of a package."""

    def read(part: str) -> Any:
        # A library may be as large as the weights, and is written to another file: no copy here.
        if loads_alone(inner.name) and archive.sizes[part] >= MAPPED:
            return archive.read_memory(part).numpy().data
        return archive.read(part)

    kept = InMemoryParts(
        {
            entry["mark"]: {name: read(part) for name, part in entry["parts"].items()}
            for entry in archive.manifest["executables"]
        }
    )
    return PackageBackend(inner, kept, dict(archive.manifest["plans"]), is_sealed=strict)


def read_weights(
    archive: Archive,
    wanted: Iterable[tuple[str, Spec]],
    checkpoint: str | os.PathLike[str] | None = None,
) -> list[Tensor]:
    """Returns the weights of a package, in order.

    Args:
        archive: The package.
        wanted: The name of each in the model, and what it is like.
        checkpoint: See `load`.

    Raises:
        PackageError: Some are missing or of another shape.
    """
    known: Mapping[str, Any] = archive.manifest["weights"]
    found = stored.loaded(archive.read_memory(WEIGHTS))
    if known["checkpoint"] is not None:
        taken = stored.Checkpoint(**known["checkpoint"])
        if Path(taken.name).name != taken.name:
            raise PackageError(
                f"{archive.path} names a checkpoint in another directory: {taken.name!r}"
            )
        given = archive.path.parent / taken.name if checkpoint is None else checkpoint
        path = Path(os.path.expanduser(given))
        found |= stored.from_checkpoint(path, taken)
    pairs = [(known["names"][name], like) for name, like in wanted]
    tensors = stored.in_order([name for name, _ in pairs], found)
    placed: dict[tuple[str, Spec], Tensor] = {}
    weights = []
    for pair, tensor in zip(pairs, tensors, strict=True):
        if pair not in placed:
            placed[pair] = stored.placed(tensor, pair[1])
        weights.append(placed[pair])
    return weights
