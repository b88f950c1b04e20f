"""Compiled steps on disk: a second process loads what a first one compiled."""

import dataclasses
import hashlib
import logging

import torch

from dynamo_backends.aot.step.programs import CopyingProgram, StepProgram
from dynamo_backends.graph.fingerprint import fingerprint
from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface.backend import Backend
from dynamo_backends.interface.errors import CompileError
from dynamo_backends.interface.options import Options
from dynamo_backends.runtime.cache import DiskCache, cache_folder

log = logging.getLogger("dynamo_backends")


def load_or_compile(backend: Backend, options: Options, graph: Graph) -> StepProgram:
    """The program of a step, from disk if it is there.

    Args:
        backend: What compiles it.
        options: Of the backend; `Options.cache` says whether to look and to keep.
        graph: Of the kind "step"; not changed.

    Raises:
        DynamoBackendsError: The backend cannot compile it.
    """
    key = _key(backend, options, graph)
    if key is None:
        return _compile(backend, options, graph)
    cache = DiskCache(cache_folder())
    parts = cache.get(key)
    if parts is not None:
        try:
            program = backend.load_step(parts, graph.copy(), options)
            program.from_disk = True
            return program
        except CompileError as error:
            log.warning("dropped an unusable cache entry: %s", error)
            cache.drop(key)
    program = _compile(backend, options, graph)
    dumped = program.dump()
    if dumped is not None:
        cache.put(key, dumped)
    return program


def _compile(backend: Backend, options: Options, graph: Graph) -> StepProgram:
    program = backend.compile_step(graph.copy(), options)
    if program is not None:
        return program
    return CopyingProgram(graph, backend.compile(graph.copy(), options).bind(())[0])


def _key(backend: Backend, options: Options, graph: Graph) -> str | None:
    versions = backend.cache_key(options) if options.cache else None
    if versions is None:
        return None
    updates = [x.updated_by for x in graph.inputs]
    settings = {**dataclasses.asdict(options), "verify": "off"}  # not compiled in
    text = (
        f"step {fingerprint(graph)} {updates} {backend.name} {versions} {torch.__version__} "
        f"{settings}"
    )
    return hashlib.sha256(text.encode()).hexdigest()
