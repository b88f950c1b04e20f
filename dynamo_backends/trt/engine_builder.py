"""Builds engines: a network from an ONNX model, ranges of sizes, the configuration."""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from torch import Tensor

from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import infer_input_layout
from dynamo_backends.graph.precision import read_tf32_settings
from dynamo_backends.graph.symbolic_sizes import SIZES, SizeWithExpression
from dynamo_backends.interface.errors import CompileError
from dynamo_backends.onnx.lowering import WEIGHTS_FILE
from dynamo_backends.runtime.cache import DiskCache, cache_folder
from dynamo_backends.trt import precision, vendor
from dynamo_backends.trt.device import driver
from dynamo_backends.trt.options import TensorRTOptions


@dataclass(frozen=True)
class Range:
    """The shapes that an input may have.

    Attributes:
        least: The smallest size in each dimension.
        best: The shape that kernels are chosen for.
        most: The largest size in each dimension.
    """

    least: tuple[int, ...]
    best: tuple[int, ...]
    most: tuple[int, ...]

    def holds(self, shape: Sequence[int]) -> bool:
        """Returns whether a shape is within the range."""
        return len(shape) == len(self.best) and all(
            low <= n <= high for low, n, high in zip(self.least, shape, self.most, strict=True)
        )

    def joined(self, other: "Range") -> "Range":
        """The smallest range that holds this one and another, best for the other's best shape."""
        return Range(
            tuple(map(min, self.least, other.least)),
            other.best,
            tuple(map(max, self.most, other.most)),
        )

    @property
    def is_static(self) -> bool:
        """Returns whether there is only one shape."""
        return self.least == self.most


Profile = Mapping[str, Range]
"""Ranges by the names of a model's inputs."""


def profile(graph: Graph, names: Sequence[str | None], max_size: int) -> dict[str, Range]:
    """Returns the ranges that an engine should serve.

    Args:
        graph: For the shapes of the first call; the engine is best for these.
        names: Names of the model's inputs, one per input of the graph.
        max_size: As in `TensorRTOptions`.
    """
    found: dict[str, Range] = {}
    weights = set(graph.weights)
    for i, (node, name) in enumerate(zip(graph.placeholders, names, strict=True)):
        value = node.meta["val"]
        if name is None or i in weights or not isinstance(value, Tensor):
            continue
        sizes = node.meta.get(SIZES) or tuple(value.shape)
        order = infer_input_layout(value).order
        ranges = [_range(sizes[d], max_size) for d in order]
        best = tuple(int(value.shape[d]) for d in order)
        found[name] = Range(tuple(r[0] for r in ranges), best, tuple(r[1] for r in ranges))
    return found


def _range(size: int, max_size: int) -> tuple[int, int]:
    if not isinstance(size, SizeWithExpression):
        return int(size), int(size)
    upper = max_size * int(size) if size.upper is None else size.upper
    return min(size.lower, int(size)), max(upper, int(size))


def profile_covers(served: Profile, wanted: Profile) -> bool:
    """Returns whether an optimization profile covers the optimal shapes of another one."""
    return served.keys() == wanted.keys() and all(
        served[name].holds(wanted[name].best) for name in wanted
    )


def joined(served: Profile, wanted: Profile) -> dict[str, Range]:
    """Returns a profile that holds both, best for the shapes of the second."""
    return {name: served[name].joined(wanted[name]) for name in wanted}


def describe(served: Profile) -> str:
    """Ranges in words, such as "x: [1..8, 3]"."""
    return ", ".join(f"{name}: [{', '.join(_dimensions(r))}]" for name, r in served.items())


def _dimensions(r: Range) -> list[str]:
    pairs = zip(r.least, r.most, strict=True)
    return [str(low) if low == high else f"{low}..{high}" for low, high in pairs]


_COMPATIBILITY = {
    "none": "NONE",
    "same_compute_capability": "SAME_COMPUTE_CAPABILITY",
    "ampere_plus": "AMPERE_PLUS",
}


@dataclass(frozen=True)
class Settings:
    """The settings on which an engine depends besides its model.

    Attributes:
        options: The user's.
        device: Index of the device.
        tf32: Whether products of float32 may be computed in TF32.
    """

    options: TensorRTOptions
    device: int
    tf32: bool

    @classmethod
    def of(cls, options: TensorRTOptions, device: int) -> "Settings":
        """As torch's flags are now."""
        allowed = options.precision == "fp32" and read_tf32_settings().allowed_everywhere
        return cls(options, device, options.precision == "tf32" or allowed)

    def key(self) -> str:
        """As text, for keys of caches."""
        o = self.options
        built = (o.precision, o.strongly_typed, o.optimization_level, o.workspace, self.tf32)
        runs = (o.hardware_compatibility, o.version_compatible, o.weight_streaming >= 0)
        return f"{vendor.tensorrt().__version__} {self._device()} {built} {runs}"

    def _device(self) -> str:
        kind = self.options.hardware_compatibility
        if kind == "none":
            return str(driver().describe(self.device))
        return str(driver().compute_capability(self.device)) if kind.startswith("same") else kind


@contextlib.contextmanager
def placeholder_weights(model: bytes) -> Iterator[str]:
    """Context manager: a path for a model beside a sparse file of zeros as weights.

    The file takes no space on disk. Weights are put into the engine afterwards; what the builder
    makes of a refittable network does not depend on them.
    """
    with tempfile.TemporaryDirectory(prefix="dynamo-backends-") as folder:
        path = Path(folder) / WEIGHTS_FILE
        path.touch()
        os.truncate(path, _weight_bytes(model))
        yield str(Path(folder) / "model.onnx")


def _weight_bytes(model: bytes) -> int:
    graph = onnx.load_model_from_string(model).graph
    ends = [0]
    for tensor in graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entries = {e.key: e.value for e in tensor.external_data}
            ends.append(int(entries["offset"]) + int(entries["length"]))
    return max(ends)


def new_network(builder: Any, strongly_typed: bool) -> Any:
    """Returns an empty network."""
    kinds = vendor.tensorrt().NetworkDefinitionCreationFlag
    flags = 1 << int(kinds.STRONGLY_TYPED) if strongly_typed else 0
    return builder.create_network(flags)


def serialize(model: ir.Model) -> bytes:
    """Returns a model as the parser reads it."""
    return ir.to_proto(model).SerializeToString()


def build(model: bytes, profile: Profile, settings: Settings) -> bytes:
    """Builds an engine without weights.

    Args:
        model: Serialized ONNX; its weights are initializers without data.
        profile: Ranges of its inputs.
        settings: What else it depends on.

    Returns:
        The serialized engine. Every weight has to be set before it is run.

    Raises:
        CompileError: TensorRT refuses the model, or finds no kernels for it.
    """
    trt, log = vendor.tensorrt(), vendor.logger()
    with driver().stream(settings.device), placeholder_weights(model) as path:
        builder = trt.Builder(log)
        network = new_network(builder, settings.options.strongly_typed)
        parser = trt.OnnxParser(network, log)
        if not parser.parse(model, path):
            raise CompileError(f"TensorRT cannot parse the model: {parser_errors(parser)}")
        config = builder.create_builder_config()
        _configure(config, settings)
        _add_profile(builder, config, profile)
        with _timing_cache(config, settings):
            plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise CompileError(f"TensorRT cannot build an engine: {vendor.last_error()}")
        return bytes(plan)


def parser_errors(parser: Any) -> str:
    """Returns what a parser complains of, in one line."""
    errors = [parser.get_error(i) for i in range(parser.num_errors)]
    return "; ".join(error_text(e) for e in errors[:3]) or vendor.last_error()


def error_text(error: Any) -> str:
    """Returns what a parser says of one node."""
    lines = str(error.desc()).strip().splitlines()
    text = lines[0] if lines else str(error.code())
    operator = error.node_operator()
    return f"{operator}: {text}" if operator else text


def _configure(config: Any, settings: Settings) -> None:
    trt, options = vendor.tensorrt(), settings.options
    flags = trt.BuilderFlag
    wanted = [flags.REFIT, flags.STRIP_PLAN, flags.STRICT_NANS]
    wanted += precision.flags(trt, options.precision, options.strongly_typed)
    if settings.tf32:
        wanted.append(flags.TF32)
    else:
        config.clear_flag(flags.TF32)  # TensorRT's default is to use it
    if options.version_compatible:
        wanted.append(flags.VERSION_COMPATIBLE)
    if options.weight_streaming >= 0:
        wanted.append(flags.WEIGHT_STREAMING)
    for flag in wanted:
        config.set_flag(flag)
    config.builder_optimization_level = options.optimization_level
    if options.workspace:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace)
    level = _COMPATIBILITY[options.hardware_compatibility]
    config.hardware_compatibility_level = getattr(trt.HardwareCompatibilityLevel, level)


def _add_profile(builder: Any, config: Any, profile: Profile) -> None:
    if all(r.is_static for r in profile.values()):
        return
    ranges = builder.create_optimization_profile()
    for name, r in profile.items():
        ranges.set_shape(name, r.least, r.best, r.most)
    if config.add_optimization_profile(ranges) < 0:
        raise CompileError(f"TensorRT rejects the optimization profile {describe(profile)}")


@contextlib.contextmanager
def _timing_cache(config: Any, settings: Settings) -> Iterator[None]:
    """Inside, a build reads and extends the measured times of kernels that are on disk."""
    options = settings.options
    if not (options.cache and options.timing_cache):
        yield
        return
    text = f"{vendor.tensorrt().__version__} {driver().describe(settings.device)}"
    key = f"timing-{hashlib.sha256(text.encode()).hexdigest()}"
    disk = DiskCache(cache_folder())
    _read_times(config, disk, key)
    yield
    _write_times(config, disk, key)


def _read_times(config: Any, disk: DiskCache, key: str) -> None:
    parts = disk.get(key) or {}
    for kept in (parts.get("times", b""), b""):
        cache = config.create_timing_cache(kept)
        if cache is not None and config.set_timing_cache(cache, ignore_mismatch=False):
            return
        disk.drop(key)  # of another version, or damaged


def _write_times(config: Any, disk: DiskCache, key: str) -> None:
    cache = config.get_timing_cache()
    if cache is None:
        return
    others = (disk.get(key) or {}).get("times")  # what other processes have measured meanwhile
    known = config.create_timing_cache(others) if others else None
    if known is not None:
        cache.combine(known, ignore_mismatch=False)
    times = bytes(cache.serialize())
    if times != others:
        disk.put(key, {"times": times})
