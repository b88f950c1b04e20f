"""The builder: from a network and a configuration to a serialized engine."""

import hashlib
import json
import math
from typing import Any

from tests.doubles.tensorrt import models
from tests.doubles.tensorrt.checking import Misuse, Native, checked
from tests.doubles.tensorrt.enums import HardwareCompatibilityLevel, MemoryPoolType, Severity
from tests.doubles.tensorrt.parsing import ILogger, INetworkDefinition, check_logger

MAGIC = b"double-trt"
_TIMES = b"double-times"

Dims = tuple[int, ...]


class IHostMemory(Native):
    """Bytes of the vendor's."""

    def __init__(self, data: bytes):
        self._data = data

    @property
    def nbytes(self) -> int:
        return len(self._data)

    def __bytes__(self) -> bytes:
        return self._data


class ITimingCache(Native):
    """Measured times, by what was measured."""

    def __init__(self, version: str, times: dict[str, float]):
        self._version = version
        self._times = times

    def serialize(self) -> IHostMemory:
        return IHostMemory(_TIMES + json.dumps([self._version, self._times]).encode())

    @checked
    def combine(self, input_cache: Native, ignore_mismatch: bool) -> bool:
        if input_cache._version != self._version and not ignore_mismatch:
            return False
        self._times.update(input_cache._times)
        return True


class IOptimizationProfile(Native):
    """Ranges of shapes."""

    def __init__(self) -> None:
        self._ranges: dict[str, tuple[Dims, Dims, Dims]] = {}

    @checked
    def set_shape(self, input: str, min: Dims, opt: Dims, max: Dims) -> None:
        if not (len(min) == len(opt) == len(max)) or any(
            not low <= best <= high for low, best, high in zip(min, opt, max, strict=True)
        ):
            raise RuntimeError("Shape provided for max is inconsistent with other shapes.")
        self._ranges[input] = tuple(min), tuple(opt), tuple(max)


class IBuilderConfig(Native):
    """How an engine is built."""

    def __init__(self, version: str, flags: Any):
        self._version = version
        self._kind = flags
        self._flags = {flags.TF32}
        self._profiles: list[IOptimizationProfile] = []
        self._timing: ITimingCache | None = None
        self._level = 3
        self._hardware = HardwareCompatibilityLevel.NONE
        self._workspace: int | None = None

    def set_flag(self, flag: Any) -> None:
        self._flags.add(self._known(flag))

    def clear_flag(self, flag: Any) -> None:
        self._flags.discard(self._known(flag))

    def _known(self, flag: Any) -> Any:
        if not isinstance(flag, self._kind):
            raise Misuse(f"{flag!r} is no BuilderFlag of this version")
        return flag

    @checked
    def set_memory_pool_limit(self, pool: MemoryPoolType, pool_size: int) -> None:
        self._workspace = pool_size

    @checked
    def add_optimization_profile(self, profile: IOptimizationProfile) -> int:
        self._profiles.append(profile)
        return len(self._profiles) - 1

    @checked
    def create_timing_cache(self, serialized_timing_cache: bytes) -> ITimingCache | None:
        data = bytes(serialized_timing_cache)
        if not data:
            return ITimingCache(self._version, {})
        if not data.startswith(_TIMES):
            return None
        return ITimingCache(*json.loads(data[len(_TIMES) :]))

    @checked
    def set_timing_cache(self, cache: ITimingCache, ignore_mismatch: bool) -> bool:
        if cache._version != self._version and not ignore_mismatch:
            return False
        self._timing = cache
        return True

    def get_timing_cache(self) -> ITimingCache | None:
        return self._timing

    @property
    def builder_optimization_level(self) -> int:
        return self._level

    @builder_optimization_level.setter
    def builder_optimization_level(self, level: int) -> None:
        if not 0 <= level <= 5:
            raise Misuse(f"there is no optimization level {level}")
        self._level = level

    @property
    def hardware_compatibility_level(self) -> HardwareCompatibilityLevel:
        return self._hardware

    @hardware_compatibility_level.setter
    def hardware_compatibility_level(self, level: HardwareCompatibilityLevel) -> None:
        self._hardware = HardwareCompatibilityLevel(level)


class Builder(Native):
    """Makes networks, configurations and engines."""

    _log: Any  # of the module: counts and facts
    _version = ""
    _flags: Any = None
    _creation: Any = None

    @checked
    def __init__(self, logger: ILogger):
        check_logger(logger)
        self._logger = logger

    @checked
    def create_network(self, flags: int = 0) -> INetworkDefinition:
        known = sum(1 << int(flag) for flag in self._creation)
        if flags & ~known:
            raise Misuse(f"unknown network flags {flags:b}")
        strongly = bool(flags & 1 << int(self._creation.STRONGLY_TYPED))
        return INetworkDefinition(self._logger, strongly or self._version.startswith("11."))

    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig(self._version, self._flags)

    def create_optimization_profile(self) -> IOptimizationProfile:
        return IOptimizationProfile()

    @checked
    def build_serialized_network(
        self, network: INetworkDefinition, config: IBuilderConfig
    ) -> IHostMemory | None:
        model = network._model
        if model is None:
            raise Misuse("the network is empty")
        reason = self._why_not(network, config)
        if reason is not None:
            self._logger.log(Severity.ERROR, reason)
            return None
        if config._timing is not None:
            key = hashlib.sha256(model.SerializeToString()).hexdigest()
            self._log.timing_hits += key in config._timing._times
            config._timing._times[key] = 1.0
        names = sorted(flag.name for flag in config._flags)
        facts = {
            "version": self._version,
            "device": self._log.device.name,
            "flags": names,
            "strongly_typed": network._strongly_typed,
            "hardware": config._hardware.name,
            "level": config._level,
            "workspace": config._workspace,
            "ranges": config._profiles[0]._ranges if config._profiles else {},
        }
        self._log.builds.append(facts)
        return IHostMemory(write(facts, model.SerializeToString()))

    def _why_not(self, network: INetworkDefinition, config: IBuilderConfig) -> str | None:
        flags = {flag.name for flag in config._flags}
        if network._strongly_typed and flags & {"FP16", "BF16"}:
            return "precision flags cannot be set on a strongly typed network"
        if "WEIGHT_STREAMING" in flags and not network._strongly_typed:
            return "weight streaming needs a strongly typed network"
        if len(config._profiles) > 1:
            return "the double knows one profile"
        ranges = config._profiles[0]._ranges if config._profiles else {}
        inputs = {v.name: models.shape_of(v) for v in network._model.graph.input}
        for name in ranges:
            if name not in inputs:
                return f"the profile names {name!r}, which is no input"
        for name, shape in inputs.items():
            if name not in ranges:
                if -1 in shape:
                    return f"the dynamic input {name!r} has no profile"
                continue
            for low, high, size in zip(ranges[name][0], ranges[name][2], shape, strict=True):
                if size != -1 and not low == high == size:
                    return f"the profile of {name!r} does not agree with its static dimensions"
        return None


def write(facts: dict[str, Any], model: bytes) -> bytes:
    """A serialized engine."""
    header = json.dumps(facts).encode()
    body = len(header).to_bytes(8, "little") + header + model
    return MAGIC + hashlib.sha256(body).digest() + body


def read(plan: bytes) -> tuple[dict[str, Any], bytes] | None:
    """The facts and the model of a serialized engine; None if it is damaged."""
    start = len(MAGIC) + 32
    body = plan[start:]
    if not plan.startswith(MAGIC) or hashlib.sha256(body).digest() != plan[len(MAGIC) : start]:
        return None
    size = int.from_bytes(body[:8], "little")
    return json.loads(body[8 : 8 + size]), body[8 + size :]


def volume(shape: Dims) -> int:
    """Number of elements."""
    return math.prod(shape)
