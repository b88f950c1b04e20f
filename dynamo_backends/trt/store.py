"""Programs in memory and on disk: built once for each graph, range of shapes, and settings."""

import hashlib
import json
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import torch

from dynamo_backends.interface.errors import CompileError
from dynamo_backends.runtime.cache import DiskCache, cache_folder, source_digest
from dynamo_backends.trt.building import Settings
from dynamo_backends.trt.profiles import Profile, Range, describe, holds, joined
from dynamo_backends.trt.program import Plan, SharedEngine

log = logging.getLogger("dynamo_backends")

Names = Sequence[str | None]
ProfileFor = Callable[[Names], Profile]
Build = Callable[[Callable[[Profile], Profile]], Plan]


class BeyondProfileError(CompileError):
    """A shape is outside of the range that an engine serves, and the user wants no other engine."""


class Store:
    """Programs by what they compute; those that no compiled graph uses any more are forgotten."""

    def __init__(self) -> None:
        self._programs: weakref.WeakValueDictionary[str, SharedEngine] = (
            weakref.WeakValueDictionary()
        )
        self._lock = threading.RLock()

    def clear(self) -> None:
        """Forgets all programs; compiled graphs keep their own."""
        with self._lock:
            self._programs.clear()

    def find(
        self, mark: str, profile_for: ProfileFor, settings: Settings, build: Build
    ) -> tuple[SharedEngine, bool]:
        """Returns a program that serves some shapes.

        Args:
            mark: Fingerprint of the graph.
            profile_for: The ranges to build for, by the names of the model's inputs; the program
                serves their best shapes.
            settings: What the program depends on besides.
            build: Builds a plan; it is given what adjusts the ranges.

        Returns:
            The program, and whether it came from disk just now.

        Raises:
            CompileError: TensorRT cannot build it.
            BeyondProfileError: With `beyond_profile="refuse"`, if a program of other shapes exists.
        """
        text = f"{mark} {settings.key()} {torch.__version__} {source_digest()}"
        key = f"tensorrt-{hashlib.sha256(text.encode()).hexdigest()}"
        memory_key = f"{key} {settings.options}"
        with self._lock:
            program = self._programs.get(memory_key)
            if program is not None and _serves(program, profile_for):
                return program, False
            if program is None and settings.options.cache:
                program = _from_disk(key, settings)
                if program is not None and _serves(program, profile_for):
                    self._programs[memory_key] = program
                    return program, True
            served = None if program is None else program.plan.profile
            plan = build(lambda wanted: _wider(served, wanted, settings))
            program = SharedEngine(plan, settings)
            self._programs[memory_key] = program
            if settings.options.cache:
                DiskCache(cache_folder()).put(key, encode(plan))
            return program, False


def _serves(program: SharedEngine, profile_for: ProfileFor) -> bool:
    return holds(program.plan.profile, profile_for(program.plan.inputs))


def _wider(served: Profile | None, wanted: Profile, settings: Settings) -> Profile:
    if served is None:
        return wanted
    if settings.options.beyond_profile == "refuse":
        shapes = ", ".join(f"{name}: {list(r.best)}" for name, r in wanted.items())
        raise BeyondProfileError(
            f"the engine serves {describe(served)}, and it was given {shapes}; use "
            'options={"beyond_profile": "rebuild"}, or give the range by '
            "torch._dynamo.mark_dynamic(tensor, dim, min=..., max=...)"
        )
    return joined(served, wanted)


def _from_disk(key: str, settings: Settings) -> SharedEngine | None:
    disk = DiskCache(cache_folder())
    parts = disk.get(key)
    if parts is None:
        return None
    try:
        return SharedEngine(decode(parts), settings)
    except CompileError as error:
        log.warning("dropped an unusable TensorRT engine: %s", error)
        disk.drop(key)
        return None


def encode(plan: Plan) -> dict[str, bytes]:
    """Returns a plan as the parts of a cache entry."""
    facts = {
        "inputs": plan.inputs,
        "outputs": plan.outputs,
        "profile": {name: asdict(r) for name, r in plan.profile.items()},
    }
    return {"facts": json.dumps(facts).encode(), "model": plan.model, "engine": plan.engine}


def decode(parts: Mapping[str, bytes]) -> Plan:
    """Returns the reverse of `encode`.

    Raises:
        CompileError: It is not a plan.
    """
    try:
        facts = json.loads(parts["facts"])
        profile = {
            name: Range(**{k: tuple(map(int, v)) for k, v in r.items()})
            for name, r in facts["profile"].items()
        }
        inputs, outputs = tuple(facts["inputs"]), tuple(facts["outputs"])
        return Plan(parts["engine"], parts["model"], inputs, outputs, profile)
    except (KeyError, TypeError, ValueError) as error:
        raise CompileError(f"it is no engine of this package: {error}") from error


PROGRAMS = Store()
"""Of this process."""
