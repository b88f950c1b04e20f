"""`load`: a callable module from a package."""

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dynamo_backends.interface.availability import availability_of
from dynamo_backends.interface.backend import Backend
from dynamo_backends.interface.errors import (
    DynamoBackendsError,
    FallbackRefusedError,
    PackageError,
    brief_error,
)
from dynamo_backends.package import weights as stored
from dynamo_backends.package.archive import Archive
from dynamo_backends.package.assembling import Contents, assembled, backend_of
from dynamo_backends.package.machine import described, differences
from dynamo_backends.package.module import PackagedModule
from dynamo_backends.package.packaged import Kept, PackageBackend
from dynamo_backends.package.portable import Portable, from_dict

GRAPH, WEIGHTS, EXAMPLES = "graph.json", "weights.safetensors", "examples.safetensors"


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

    A package has machine code: load those alone whose origin you trust. Nothing is unpickled.

    Args:
        path: Of the file.
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
            return _loaded(archive, strict, checkpoint)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise PackageError(f"{path} has an unusable manifest: {brief_error(error)}") from error


def _loaded(
    archive: Archive, strict: bool, checkpoint: str | os.PathLike[str] | None
) -> PackagedModule:
    manifest = archive.manifest
    contents = Contents.of(manifest)
    portable = from_dict(json.loads(archive.read(GRAPH)))
    weights = read_weights(archive, portable, checkpoint)
    backend, reason = _usable(archive, contents, strict)
    try:
        module = assembled(contents, portable, weights, backend, manifest["notes"])
    except FallbackRefusedError:
        raise
    except DynamoBackendsError as error:
        backend, reason = None, f"{contents.backend} does not take it here: {error}"
        module = assembled(contents, portable, weights, None, manifest["notes"])
    if reason:
        what = "runs in eager" if backend is None else "was compiled from its portable form"
        text = f"{archive.path} {what}: {reason}"
        if strict:
            raise PackageError(f"{text}. strict=True refuses that; save it on this machine.")
        warnings.warn(text, UserWarning, stacklevel=3)
    return module


def _usable(archive: Archive, contents: Contents, strict: bool) -> tuple[Backend | None, str]:
    """What runs the graph, and why that is not what was saved; empty if it is."""
    manifest = archive.manifest
    inner = backend_of(contents.backend)
    if inner is None:
        return None, ""
    available = availability_of(inner)
    if not available.usable:
        remedy = f" ({available.remedy})" if available.remedy else ""
        return None, f"{contents.backend} cannot run here: {available.reason}{remedy}"
    if not manifest["executables"]:
        return inner, f"it has no executables of {contents.backend}" if strict else ""
    here = described(inner, contents.parsed(inner))
    found = differences(manifest["machine"], here)
    if found:
        if strict:
            raise PackageError(
                f"{archive.path} was saved for another machine: {'; '.join(found)}. "
                "strict=True refuses to compile it; save it on this one."
            )
        return inner, "; ".join(found)
    kept = Kept(
        {
            entry["mark"]: {name: archive.read(part) for name, part in entry["parts"].items()}
            for entry in manifest["executables"]
        }
    )
    return PackageBackend(inner, kept, dict(manifest["plans"]), is_sealed=strict), ""


def read_weights(
    archive: Archive, portable: Portable, checkpoint: str | os.PathLike[str] | None = None
) -> list[Tensor]:
    """The weights of a package, in order.

    Raises:
        PackageError: Some are missing or of another shape.
    """
    known: Mapping[str, Any] = archive.manifest["weights"]
    found = stored.loaded(archive.read(WEIGHTS))
    if known["checkpoint"] is not None:
        taken = stored.Checkpoint(**known["checkpoint"])
        if Path(taken.name).name != taken.name:
            raise PackageError(f"{archive.path} names a checkpoint elsewhere: {taken.name!r}")
        path = archive.path.parent / taken.name if checkpoint is None else Path(checkpoint)
        found |= stored.from_checkpoint(path, taken)
    names = [known["names"][name] for name in portable.weights]
    tensors = stored.in_order(names, found)
    places = portable.places
    placed: dict[tuple[str, Any], Tensor] = {}
    weights = []
    for name, tensor, place in zip(names, tensors, places, strict=False):
        like = place.meta["val"]
        key = name, like.stride()
        if key not in placed:
            placed[key] = stored.placed(tensor, like)
        weights.append(placed[key])
    return weights
