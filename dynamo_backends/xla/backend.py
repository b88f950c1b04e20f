"""The backend `openxla`: XLA through PJRT, on CPU, CUDA and TPU, without torch_xla."""

import functools
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import fx

from dynamo_backends._torch_private import OpOverload
from dynamo_backends.graph.call_arguments import collect_call_tensors, dynamic_shape_reason
from dynamo_backends.graph.graph import Graph, find_device_index
from dynamo_backends.graph.symbolic_sizes import all_varying_sizes
from dynamo_backends.interface.backend import Availability, Backend
from dynamo_backends.interface.errors import DeviceError, OptionError
from dynamo_backends.interface.mesh import InputPlacement, Mesh
from dynamo_backends.interface.packages import is_module_installed
from dynamo_backends.interface.plan import SUPPORTED, Plan, Support
from dynamo_backends.interface.protocols import BucketRule, MeshTarget
from dynamo_backends.runtime.freed_memory import keep_freed_memory
from dynamo_backends.xla.options import (
    XlaOptions,
    convolution_precision,
    lowering_options,
    matmul_precision,
    parse_device_name,
)

if TYPE_CHECKING:
    from dynamo_backends.xla.mesh.placements import MeshPlacements


@functools.cache
def has_tpu() -> bool:
    """Returns whether there are a TPU and its library, in the two places where jax looks."""
    if not is_module_installed("libtpu") and "TPU_LIBRARY_PATH" not in os.environ:
        return False
    from dynamo_backends.xla._jaxlib import tpu_chips

    return tpu_chips() > 0


def has_cuda_plugin() -> bool:
    """Returns whether jax can use CUDA devices."""
    names = ("jax_cuda12_plugin", "jax_cuda13_plugin", "jax_plugins.xla_cuda13")
    return any(map(is_module_installed, names))


@functools.cache
def cuda_cache_key() -> str:
    """Returns names and capabilities of the CUDA devices, as a part of the cache key."""
    if not torch.cuda.is_available() or not has_cuda_plugin():
        return ""
    count = torch.cuda.device_count()
    names = [f"{torch.cuda.get_device_name(i)} {torch.cuda.get_device_capability(i)}"
             for i in range(count)]  # fmt: skip
    return f"{names}"


@functools.cache
def tpu_cache_key() -> str:
    """Returns TPU kind and platform version, as a part of the cache key."""
    from dynamo_backends.xla.runtime import open_device

    handle = open_device("tpu").handle
    return f"{handle.device_kind} {handle.client.platform_version}"


class OpenXLA(Backend):
    """Implements the backend `openxla`: compiles graphs with XLA through PJRT."""

    name = "openxla"
    summary = "XLA through PJRT, without torch_xla"
    Options = XlaOptions
    trains = True
    packages: ClassVar[Mapping[str, str]] = {"jax": "jax", "jaxlib": "jaxlib"}
    optional_packages = ("jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu")
    install = "pip install 'dynamo-backends[xla]'"

    def availability(self) -> Availability:
        """See `Backend.availability`."""
        if no := self.check_packages():
            return no
        devices = ["cpu"]
        if torch.cuda.is_available() and has_cuda_plugin():
            devices.append("cuda")
        if has_tpu():
            devices.append("tpu")
        found = f"XLA of jaxlib {self.versions()['jaxlib']}"
        return Availability(True, found, devices=tuple(devices))

    def check_graph(self, graph: Graph, options: XlaOptions) -> None:
        """See `Backend.check_graph`."""
        from dynamo_backends.xla.runtime import open_device

        if options.mesh is not None:
            return  # its devices are looked for when a graph is compiled
        platform_name, index = _target(graph, options)
        if platform_name == "cuda" and not has_cuda_plugin():
            asked = (
                "device='cuda' was requested"
                if options.device == "cuda"
                else ("the tensors are on a CUDA device")
            )
            raise DeviceError(
                f"{asked}, but jax has no CUDA plugin; run: pip install 'jax[cuda13]'"
            )
        open_device(platform_name, index)

    def options_for_device(self, options: XlaOptions, device: str) -> XlaOptions:
        """See `OwnsDevice.options_for_device`."""
        if options.mesh is not None:
            return options  # what is elsewhere comes to the host, and is split from there
        if parse_device_name(device) is None:
            raise DeviceError(
                f"tensors are on the {device}, a mesh for training steps of compile_step, but "
                "other graphs run on one device. Pass the mesh to compile_step, or "
                "options={'mesh': …} to torch.compile, run the model in eager, or move it back "
                "with dynamo_backends.xla.to_device(model, 'cpu')."
            )
        return replace(options, device=device) if options.device == "auto" else options

    def resident_device(self, options: XlaOptions) -> str | None:
        """See `OwnsDevice.resident_device`."""
        if options.mesh is not None or options.device in ("auto", "cpu", "cuda"):
            return None
        from dynamo_backends.xla.runtime import open_device

        device = open_device(*_parts(options.device))
        if not device.is_remote:
            return None
        from dynamo_backends.xla.device_transfer import register_eager_device

        return register_eager_device(device)

    def preserved_operators(self, options: XlaOptions) -> Collection[OpOverload]:
        """See `Backend.preserved_operators`: whatever has a lowering is handed over whole."""
        return _table().overloads()

    def supports(self, node: fx.Node, options: XlaOptions) -> Support:
        """See `Backend.supports`."""
        if _is_distributed(node) and (apart := _kept_apart(options)):
            return Support(False, apart)
        row = _table().lookup(node.target)
        if row is None:
            return Support(False, "it has no lowering to XLA")
        from dynamo_backends.xla.dtypes import is_supported

        for value in collect_call_tensors(node):
            if value.layout is not torch.strided:
                return Support(False, f"XLA does not support {value.layout} tensors")
            if not is_supported(value.dtype):
                return Support(False, f"XLA does not support {value.dtype}")
        reason = dynamic_shape_reason(node)
        if reason is None and row.when is not None:
            reason = row.when(node)
        return SUPPORTED if reason is None else Support(False, reason)

    def plan(self, graph: Graph, options: XlaOptions) -> Plan:
        """See `Backend.plan`: on graphs with collectives all processes agree."""
        plan = super().plan(graph, options)
        if options.collectives == "torch" or not any(map(_is_distributed, graph.calls)):
            return plan
        from dynamo_backends.xla.mesh.distributed_graphs import agree_on_plan

        return agree_on_plan(graph, plan)

    def single_process_options(self, options: XlaOptions) -> XlaOptions:
        """See `SpansMesh.single_process_options`."""
        return replace(options, collectives="torch")

    def buckets(self, options: XlaOptions) -> BucketRule | None:
        """See `PadsShapes.buckets`."""
        if options.mesh is not None or (options.bucket_growth == 1 and not options.buckets):
            return None
        return BucketRule(options.bucket_growth, options.exact_after, options.buckets)

    def compile(self, graph: Graph, options: XlaOptions) -> Any:
        """See `Backend.compile`."""
        if (spread := options.spread) is not None:
            return self._compile_on_mesh(graph, options, spread)
        if any(map(_is_distributed, graph.calls)):
            from dynamo_backends.xla.mesh.distributed_graphs import (
                compile_distributed_graph,
                has_collectives,
            )

            if has_collectives(graph):
                return compile_distributed_graph(graph, lowering_options("cpu", options))
        from dynamo_backends.xla.compiler import compile_graph
        from dynamo_backends.xla.runtime import open_device

        platform_name, index = _target(graph, options)
        device = open_device(platform_name, index)
        lowering = lowering_options(device.platform, options)
        if next(all_varying_sizes(graph), None) is not None:
            from dynamo_backends.xla.padded.compiler import compile_padded

            return _keeping_memory(compile_padded(graph, device, lowering), options)
        return _keeping_memory(compile_graph(graph, device, lowering), options)

    def placements(
        self, graph: Graph, names: Sequence[str], options: XlaOptions
    ) -> Sequence[InputPlacement | None]:
        """See `SpansMesh.placements`."""
        spread = options.spread
        return () if spread is None else spread.of_inputs(graph, names)

    def _compile_on_mesh(self, graph: Graph, options: XlaOptions, spread: "MeshPlacements") -> Any:
        from dynamo_backends.xla.mesh.devices import open_mesh
        from dynamo_backends.xla.mesh.inference import compile_on_mesh

        device = open_mesh(_platform_of_mesh(options, spread.mesh), spread.mesh)
        lowering = lowering_options(device.platform, options)
        return compile_on_mesh(graph, device, lowering, spread.batch)

    def donates(self, graph: Graph, options: XlaOptions) -> bool:
        """See `UpdatesInputs.donates`: on the CPU."""
        return options.mesh is None and _target(graph, options)[0] == "cpu"

    def compile_step(self, graph: Graph, options: XlaOptions) -> Any:
        """See `CompilesSteps.compile_step`: inputs are donated, but for torch's on CUDA."""
        _refuse_mesh(options)
        from dynamo_backends.xla.runtime import open_device

        device = open_device(*_target(graph, options))
        if device.platform == "cuda":
            return None
        from dynamo_backends.xla.steps import compile_step

        lowering = lowering_options(device.platform, options)
        return _keeping_memory(compile_step(graph, device, lowering), options)

    def make_mesh_target(self, options: XlaOptions, mesh: Mesh) -> MeshTarget:
        """See `SpansMesh.make_mesh_target`: on CPUs and TPUs."""
        _refuse_mesh(options)
        from dynamo_backends.xla.mesh.devices import open_mesh
        from dynamo_backends.xla.mesh.target import XlaMesh

        device = open_mesh(_platform_of_mesh(options, mesh), mesh)
        return XlaMesh(device, lowering_options(device.platform, options))

    def load_step(self, parts: Mapping[str, bytes], graph: Graph, options: XlaOptions) -> Any:
        """See `SavesSteps.load_step`."""
        from dynamo_backends.xla.runtime import open_device
        from dynamo_backends.xla.steps import load_step

        step = load_step(parts, graph, open_device(*_target(graph, options)))
        return _keeping_memory(step, options)

    def cache_key(self, options: XlaOptions) -> str | None:
        """See `SavesExecutables.cache_key`: programs for meshes are not kept."""
        if options.mesh is not None:
            return None
        from dynamo_backends.runtime.cpu_info import cpu_cache_key
        from dynamo_backends.xla import _jaxlib

        precision = matmul_precision(options), convolution_precision("cuda", options)
        flags = os.environ.get("XLA_FLAGS"), _jaxlib.CPU_DISABLED_PASSES
        settings = (*precision, torch.get_num_threads(), *flags)
        devices = f"{cuda_cache_key()} {tpu_cache_key() if options.device == 'tpu' else ''}"
        return f"{self.versions()} {_package_version()} {cpu_cache_key()} {devices} {settings}"

    def load(self, parts: Mapping[str, bytes], graph: Graph, options: XlaOptions) -> Any:
        """See `SavesExecutables.load`."""
        from dynamo_backends.xla.runtime import open_device
        from dynamo_backends.xla.updating import executable_for

        device = open_device(*_target(graph, options))
        if next(all_varying_sizes(graph), None) is not None:
            from dynamo_backends.xla.padded.compiler import load_padded

            return _keeping_memory(load_padded(parts, graph, device), options)
        made = executable_for(graph).load(device, graph, dict(parts))
        return _keeping_memory(made, options)


def _keeping_memory(made: Any, options: XlaOptions) -> Any:
    """Returns a program; malloc keeps what it allocates in each run, if that is asked for."""
    if options.reserve:
        keep_freed_memory(getattr(made, "temporary_bytes", 0))
    return made


def _table() -> Any:
    import dynamo_backends.xla.lowering
    from dynamo_backends.xla.lowering import registry

    del dynamo_backends
    return registry


def _target(graph: Graph, options: XlaOptions) -> tuple[str, int]:
    """Platform and device index for a graph."""
    if options.device != "auto":
        return _parts(options.device)
    index = find_device_index((*graph.placeholders, *graph.calls), "cuda")
    return ("cpu", 0) if index is None else ("cuda", index)


def _platform_of_mesh(options: XlaOptions, mesh: Mesh) -> str:
    """Returns where the devices of a mesh are.

    Raises:
        OptionError: The option `device` names one device, or another kind than the mesh has.
    """
    asked = "" if options.device == "auto" else options.device
    if ":" in asked:
        raise OptionError(
            f"option 'device' of openxla is {asked!r}, which is a single device, but a mesh needs "
            f"several. Pass 'device': {asked.partition(':')[0]!r}."
        )
    if asked and mesh.kind and asked != mesh.kind:
        raise OptionError(
            f"option 'device' is {asked!r}, but the mesh has {mesh.kind} devices. Pass the same "
            "kind, or remove the option."
        )
    platform = asked or mesh.kind or "cpu"
    if platform not in ("cpu", "tpu"):
        raise OptionError(f"openxla supports meshes of 'cpu' or 'tpu' devices, not of {platform!r}")
    return platform


def _is_distributed(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", "") == "_c10d_functional"


def _kept_apart(options: XlaOptions) -> str:
    """Returns why all collectives are left to torch; empty: they are not."""
    if options.collectives == "torch":
        return "the option collectives leaves it to torch"
    if options.compiles_in_background:
        return (
            "with while_compiling='eager', processes would start to use compiled code at different "
            "calls"
        )
    if options.mesh is not None or options.device not in ("auto", "cpu"):
        return "XLA runs collectives between processes on CPUs only"
    return ""


def _refuse_mesh(options: XlaOptions) -> None:
    if options.mesh is not None:
        raise OptionError(
            "option 'mesh' of openxla is for inference only. For training use the arguments of "
            "compile_step: compile_step(..., mesh=…, placements=…)."
        )


def _parts(device: str) -> tuple[str, int]:
    parts = parse_device_name(device)
    assert parts is not None  # see `XlaOptions.validate`
    return parts


@functools.cache
def _package_version() -> str:
    """Changes whenever this package's own code does."""
    from dynamo_backends.runtime.cache import source_digest

    return source_digest()
