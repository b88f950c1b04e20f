"""Loads compiled code from the disk cache, or compiles and stores it.

Results do not depend on the cache: where reading or writing fails, that is noted and done without.
"""

import dataclasses
import hashlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch

from dynamo_backends.interface import protocols
from dynamo_backends.interface.backend import Backend
from dynamo_backends.interface.errors import CompileError, suppress_and_log
from dynamo_backends.interface.executable import ArtifactStore, Executable
from dynamo_backends.interface.options import Options
from dynamo_backends.interface.report import GraphReport
from dynamo_backends.runtime.cache import DiskCache, cache_folder

log = logging.getLogger("dynamo_backends")


class Dumpable(Protocol):
    """The interface of something that can be serialized to the disk cache."""

    def dump(self) -> dict[str, bytes] | None:
        """Serializes to named bytes; None if it cannot be saved."""


T = TypeVar("T", bound=Dumpable)


def load_or_compile(
    backend: Backend,
    options: Options,
    mark: str,
    load: Callable[[Mapping[str, bytes]], T],
    make: Callable[[], T],
    report: GraphReport | None = None,
    keep: Callable[[T], bool] = lambda made: True,
    dump: Callable[[T], Mapping[str, bytes] | None] = lambda made: made.dump(),
) -> T:
    """Loads from the disk cache, or compiles and stores; cache errors are only noted.

    Args:
        backend: What compiles it.
        options: Options of the backend; `Options.cache` says whether to look and to keep.
        mark: Of what is compiled.
        load: Makes it from what it was dumped to.
        make: Compiles it.
        report: Gets what failed and was done without.
        keep: Whether what was compiled is what `mark` says.
        dump: What is kept of it.
    """
    cache = DiskCache(cache_folder()) if backend.kept is None else backend.kept
    key: str | None = None
    with suppress_and_log(report, "reading the disk cache"):
        key = disk_cache_key(backend, options, mark) if backend.kept is None else mark
        found = _loaded(cache, key, load) if key is not None else None
        if found is not None:
            return found
    made = make()
    if key is not None and keep(made):
        with suppress_and_log(report, "writing to the disk cache"):
            dumped = dump(made)
            if dumped is not None:
                cache.put(key, dumped)
    return made


def disk_cache_key(backend: Backend, options: Options, mark: str) -> str | None:
    """Returns the disk-cache key of backend, options and graph; None if not cached."""
    versions = protocols.cache_key(backend, options) if options.cache else None
    if versions is None:
        return None
    not_compiled_in = {"verify": "off", "while_compiling": "wait", "slow": "off"}
    settings = {**dataclasses.asdict(options), **not_compiled_in}
    text = f"{mark} {backend.name} {versions} {torch.__version__} {settings}"
    return hashlib.sha256(text.encode()).hexdigest()


def _loaded(cache: ArtifactStore, key: str, load: Callable[[Mapping[str, bytes]], T]) -> T | None:
    """Returns what is under a key, if it is there; an entry that cannot be used is dropped."""
    parts = cache.get(key)
    if parts is None:
        return None
    try:
        return load(parts)
    except Exception as error:
        cache.drop(key)
        if not isinstance(error, CompileError):
            raise
        log.warning("dropped an unusable cache entry: %s", error)
        return None


E = TypeVar("E", bound=Executable)


def require_single_executable(report: GraphReport, kind: type[E], vendor: str, hint: str = "") -> E:
    """Returns the one executable of a graph; raises `CompileError` if there are more.

    Args:
        report: Report of the graph.
        kind: What it has to be.
        vendor: The vendor's name, for messages.
        hint: What else to say if it is something else.

    Raises:
        CompileError: There is none; the message says why.
    """
    if report.fallbacks or report.blocks != 1:
        reasons = "; ".join(f"{f.op}: {f.reason}" for f in report.fallbacks)
        raise CompileError(
            f"only a graph that runs entirely on {vendor} can be saved, but this one has "
            f"{report.ops_in_eager} operators in eager ({reasons})"
        )
    program: Any = getattr(report.executable, "static_program", None)
    if program is None:
        raise CompileError(
            "a graph with symbolic shapes is compiled once per shape; compile it with "
            "dynamic=False to save it"
        )
    blocks = getattr(program, "blocks", ())
    executable = blocks[0].executable if blocks else None
    if not isinstance(executable, kind):
        raise CompileError(f"{report.backend} did not compile this graph with {vendor}{hint}")
    return executable
