"""Compares a package with itself: checksums, and compiled code with the portable form."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree

from dynamo_backends.package import weights as stored
from dynamo_backends.package.archive import Archive
from dynamo_backends.package.linked import difference_from_eager
from dynamo_backends.package.loading import EXAMPLES, STEP, load
from dynamo_backends.package.structure import decoded


@dataclass(frozen=True)
class Outcome:
    """The result of comparing a package with its portable form.

    Attributes:
        backend: What ran the model; "eager" where the backend could not.
        executables: How many came from the file.
        compiled: How many were compiled.
        difference: What distinguishes the results, in words; None: nothing that matters.
    """

    backend: str
    executables: int
    compiled: int
    difference: str | None


def check_parts(path: str | os.PathLike[str]) -> int:
    """Verifies the checksum of each part of a package; returns how many there are.

    Raises:
        PackageError: One is damaged.
    """
    with Archive(path) as archive:
        for name in archive.sizes:
            archive.read(name)
        return len(archive.sizes)


def is_step(path: str | os.PathLike[str]) -> bool:
    """Returns whether a package has a training step.

    Raises:
        PackageError: It is none.
    """
    with Archive(path) as archive:
        return archive.manifest.get("kind") == STEP


def compare_package(
    path: str | os.PathLike[str],
    strict: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
) -> Outcome:
    """Loads a package and compares its results with those of the portable graph.

    Args:
        path: Path of the file.
        strict: See `load`.
        checkpoint: See `load`.

    Raises:
        PackageError: See `load`.
    """
    module = load(path, strict=strict, checkpoint=checkpoint)
    difference = difference_from_eager(module, _examples(path, module.portable.leaves), module)
    made = sum(report.executables for report in module.reports)
    hits = sum(report.cache_hits for report in module.reports)
    return Outcome(module.backend, hits, made - hits, difference)


def _examples(path: str | os.PathLike[str], known: Sequence[Any]) -> Any:
    """Returns the arguments that the model was saved with."""
    with Archive(path) as archive:
        tensors = stored.loaded(archive.read_memory(EXAMPLES))
        leaves: dict[str, Any] = {n: x.to(known[int(n)].device) for n, x in tensors.items()}
        leaves |= {number: decoded(node) for number, node in archive.manifest["constants"].items()}
        call = decoded(archive.manifest["arguments"])
    numbers, spec = pytree.tree_flatten(call)
    return pytree.tree_unflatten([leaves[str(number)] for number in numbers], spec)
