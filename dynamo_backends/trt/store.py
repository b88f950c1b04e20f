"""Programs in memory and on disk, built once for each graph and settings, and engines as files."""

import hashlib
import json
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dynamo_backends.graph.layouts import InputConverter, OutputConverter
from dynamo_backends.interface.errors import CompileError, DeviceError
from dynamo_backends.interface.report import GraphReport
from dynamo_backends.runtime.cache import DiskCache, cache_folder, source_digest
from dynamo_backends.runtime.load_or_compile import require_single_executable
from dynamo_backends.trt import vendor
from dynamo_backends.trt.device import driver, to_tensorrt
from dynamo_backends.trt.engine import Engine
from dynamo_backends.trt.engine_builder import (
    Profile,
    Range,
    Settings,
    describe,
    joined,
    profile_covers,
)
from dynamo_backends.trt.options import TensorRTOptions
from dynamo_backends.trt.program import Plan, SharedEngine
from dynamo_backends.trt.runtime import TensorRTExecutable, launch

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
    return profile_covers(program.plan.profile, profile_for(program.plan.inputs))


def _wider(served: Profile | None, wanted: Profile, settings: Settings) -> Profile:
    if served is None:
        return wanted
    if settings.options.beyond_profile == "refuse":
        shapes = ", ".join(f"{name}: {list(r.best)}" for name, r in wanted.items())
        raise BeyondProfileError(
            f"the engine supports {describe(served)}, but was called with {shapes}. Use "
            'options={"beyond_profile": "rebuild"}, or declare the range with '
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
        raise CompileError(f"it is not an engine of this package: {error}") from error


PROGRAMS = Store()
"""Of this process."""


def save(report: GraphReport, path: str | os.PathLike[str]) -> None:
    """Saves the engine of a compiled graph, with the weights of its last call.

    The file is a plain TensorRT engine: other programs can load it too. `<path>.json` says which of
    its tensors is which input and output, and how torch stores them.

    Examples:
        >>> with dynamo_backends.record() as reports:
        ...     compiled(x)
        >>> dynamo_backends.trt.save(reports[0], "model.engine")
        >>> engine = dynamo_backends.trt.load("model.engine")
        >>> (y,) = engine(x)

    Args:
        report: Of the graph. It must have static shapes, run whole on TensorRT, and have run.
        path: The file to write.

    Raises:
        CompileError: The graph is not one that can be saved; the message says why.
    """
    executable = _executable(report)
    plan = executable.program.serialize()
    facts = {
        "tensorrt": vendor.tensorrt().__version__,
        "device": driver().describe(executable.program.settings.device),
        "version_compatible": executable.program.settings.options.version_compatible,
        "inputs": [_describe(n, v) for n, v in executable.described_inputs()],
        "outputs": [_describe(n, v) for n, v in executable.described_outputs()],
    }
    path = os.path.expanduser(path)
    Path(path).write_bytes(plan)
    Path(f"{os.fspath(path)}.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")


def load(path: str | os.PathLike[str], device: int = 0) -> "SavedEngine":
    """Loads what `save` has written.

    Args:
        path: As for `save`.
        device: Index of the device to run on.

    Raises:
        CompileError: TensorRT does not take the engine, such as one of another version or GPU.
        DeviceError: There is no device here.
    """
    reason = vendor.why_unavailable() or driver().why_not()
    if reason is not None:
        raise DeviceError(f"a TensorRT engine cannot be loaded here: {reason}")
    path = os.path.expanduser(path)
    try:
        facts = json.loads(Path(f"{os.fspath(path)}.json").read_text(encoding="utf-8"))
        options = TensorRTOptions(version_compatible=facts["version_compatible"])
        inputs = [_Tensor(**x) for x in facts["inputs"]]
        outputs = [_Tensor(**x) for x in facts["outputs"]]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CompileError(f"{path}.json does not describe an engine: {error}") from error
    try:
        engine = Engine(Path(path).read_bytes(), b"", Settings(options, device, False))
    except CompileError as error:
        made = f"TensorRT {facts['tensorrt']} on {facts['device']}"
        raise CompileError(f"{path} was made by {made}: {error}") from error
    return SavedEngine(engine, inputs, outputs, device)


class SavedEngine:
    """An engine from a file: a function from tensors to a list of tensors."""

    def __init__(
        self, engine: Engine, inputs: "Sequence[_Tensor]", outputs: "Sequence[_Tensor]", device: int
    ):
        expected = {x.name: to_tensorrt(x.dtype) for x in (*inputs, *outputs)}
        if engine.tensors() != expected:
            raise CompileError(f"the engine has the tensors {engine.tensors()}, not {expected}")
        self._engine = engine
        self._inputs = [(x.name, InputConverter(x.fake())) for x in inputs]
        self._outputs = [(x.name, x.dtype, OutputConverter(x.fake()), x.stored()) for x in outputs]
        self._device = torch.device(driver().kind, device)

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        """Runs the engine on torch's current stream.

        Raises:
            TypeError: The number of tensors is wrong.
            ValueError: A shape or dtype is wrong.
            DeviceError: A tensor is elsewhere.
        """
        if len(tensors) != len(self._inputs):
            raise TypeError(f"the engine takes {len(self._inputs)} tensors, not {len(tensors)}")
        for tensor in tensors:
            if tensor.device.type != self._device.type:
                raise DeviceError(
                    f"the engine runs on {self._device}, and a tensor is on {tensor.device}"
                )
        given = [(name, check(t)) for (name, check), t in zip(self._inputs, tensors, strict=True)]
        results = [torch.empty(s, dtype=d, device=self._device) for _, d, _, s in self._outputs]
        made = [(n, r) for (n, *_), r in zip(self._outputs, results, strict=True)]
        launch(self._engine, [*given, *made], (), self._device)
        return [e(r) for (_, _, e, _), r in zip(self._outputs, results, strict=True)]


class _Tensor:
    """An input or output as it was described in a file."""

    def __init__(self, name: str, dtype: str, shape: Sequence[int], stride: Sequence[int]):
        self.name = name
        self.dtype: torch.dtype = getattr(torch, dtype)
        self._shape, self._stride = tuple(shape), tuple(stride)

    def fake(self) -> Tensor:
        """Returns a tensor of the shape and strides that torch promises."""
        return torch.empty_strided(self._shape, self._stride, dtype=self.dtype, device="meta")

    def stored(self) -> tuple[int, ...]:
        """Returns the shape in the order of memory."""
        return OutputConverter(self.fake()).storage.dense_shape(self._shape)


def _describe(name: str, value: Tensor) -> dict[str, Any]:
    return {
        "name": name,
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "stride": list(value.stride()),
    }


def _executable(report: GraphReport) -> TensorRTExecutable:
    hint = " alone; set the option cudagraphs to False"
    executable = require_single_executable(report, TensorRTExecutable, "TensorRT", hint)
    if executable.shares_weights:
        raise CompileError(
            "the graph reads weights that are not floating-point tensors without copying them, so "
            "the engine does not contain them"
        )
    return executable
