"""The backends `onnxrt`, `onnxrt_cpu` and `onnxrt_cuda`: ONNX Runtime on torch's memory."""

import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import fx

from dynamo_backends._torch_private import OpOverload
from dynamo_backends.graph.graph import Graph, find_device_index
from dynamo_backends.graph.precision import read_tf32_settings
from dynamo_backends.int8.options import Int8Options
from dynamo_backends.interface.backend import RANGED, Availability, Backend
from dynamo_backends.interface.errors import DeviceError, OptionError, suppress_and_log
from dynamo_backends.interface.options import Limits
from dynamo_backends.interface.plan import Plan, Support
from dynamo_backends.onnx import PACKAGES
from dynamo_backends.ort import cuda
from dynamo_backends.runtime.cache import vendor_folder

_INSTALL_CUDA = "pip uninstall onnxruntime && pip install onnxruntime-gpu"
_PROVIDER = {"cpu": cuda.CPU, "cuda": cuda.CUDA}


@dataclass(frozen=True)
class OrtOptions(Int8Options):
    """The options of the ONNX Runtime backends, besides those that every backend has.

    Attributes:
        graph_optimization_level: How much ONNX Runtime rewrites the model.
        intra_op_threads: Number of threads that run one graph; 0: as many as torch uses.
        provider_options: Options of the execution provider that runs the graph, such as
            `{"cudnn_conv_algo_search": "HEURISTIC"}`; names and values are those of ONNX Runtime.
        session_config: Session configuration entries, such as
            `{"session.intra_op.allow_spinning": "1"}`.
        provider: Execution provider for CUDA devices: ONNX Runtime's own kernels ("cuda"), or
            TensorRT engines with ONNX Runtime's kernels for other operators ("tensorrt").
        cudagraphs: On CUDA devices: ONNX Runtime records the third run of a graph as a CUDA graph
            and launches that from then on. Inputs and results are copied.
        precision: "float32" computes in the dtypes that the model has. On the CPU "int8" quantizes
            linear layers and convolutions, with scales from `calibration`; "int8-dynamic" linear
            layers, with scales of each call. Both need `tolerance` (docs/int8.md).
    """

    graph_optimization_level: Literal["all", "extended", "basic", "none"] = "all"
    intra_op_threads: int = 0
    provider_options: dict[str, str] | None = None
    session_config: dict[str, str] | None = None
    provider: Literal["cuda", "tensorrt"] = "cuda"
    cudagraphs: bool = False
    precision: Literal["float32", "int8", "int8-dynamic"] = "float32"

    LIMITS: ClassVar[Limits] = {"intra_op_threads": (0, None)}

    def validate(self, backend: str) -> None:
        """See `Options.validate`."""
        super().validate(backend)
        for name in ("provider_options", "session_config"):
            for key, value in (getattr(self, name) or {}).items():
                if not isinstance(key, str) or not isinstance(value, str):
                    raise OptionError(
                        f"option {name!r} of {backend} must map strings to strings; {key!r}: "
                        f"{value!r} is invalid."
                    )


class OnnxRuntime(Backend):
    """The backend `onnxrt`: picks CPU or CUDA providers by the tensors' device."""

    name = "onnxrt"
    summary = "ONNX Runtime, on the device of the tensors"
    Options = OrtOptions
    trains = True
    dynamic_shapes = RANGED
    serves_ranges = True
    depends_on_ranges = False
    packages = PACKAGES
    optional_packages = ("onnxruntime-*",)  # builds for devices, which have the same module
    install = "pip install 'dynamo-backends[onnx]'"
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    def availability(self) -> Availability:
        """See `Backend.availability`."""
        if no := self.check_packages():
            return no
        usable = tuple(d for d in self.devices if _has_device(d))
        if not usable:
            return Availability(False, *_why_no_cuda())
        versions = [v for n, v in self.versions().items() if n.startswith("onnxruntime")]
        return Availability(True, " ".join(("ONNX Runtime", *versions)), devices=usable)

    def check_graph(self, graph: Graph, options: OrtOptions) -> None:
        """See `Backend.check_graph`."""
        for node in graph.placeholders:
            kind = node.meta["val"].device.type if hasattr(node.meta["val"], "device") else "cpu"
            if kind not in self.devices and not (kind == "cpu" and node.meta["val"].ndim == 0):
                raise DeviceError(
                    f"{self.name} runs tensors on {' and '.join(self.devices)}, and an input is on "
                    f"{kind}; use backend='onnxrt', which follows the tensors' device, or move the "
                    "model and its inputs."
                )
            if kind == "cuda" and not _has_device("cuda"):
                reason, remedy = _why_no_cuda()
                raise DeviceError(f"the tensors are on a CUDA device, but {reason}; run: {remedy}")
        if find_device_index(graph.placeholders, "cuda") is not None:
            _check_tensorrt(options, self.name)
        elif options.cudagraphs or options.provider != "cuda":
            asked = "cudagraphs=True" if options.cudagraphs else f"provider={options.provider!r}"
            raise DeviceError(
                f"{self.name} was called with {asked}, which needs CUDA inputs, but no input is on "
                "a CUDA device. Move the model and its inputs to a CUDA device, or remove the "
                "option."
            )

    def preserved_operators(self, options: OrtOptions) -> Collection[OpOverload]:
        """See `Backend.preserved_operators`: whatever has a lowering that is used."""
        from dynamo_backends.onnx.exporter_lowerings import lowered_overloads

        return lowered_overloads()

    def decomposed_operators(self, options: OrtOptions) -> Collection[OpOverload]:
        """See `Backend.decomposed_operators`."""
        from dynamo_backends.onnx.exporter_lowerings import unlowered_overloads

        return unlowered_overloads()

    def supports(self, node: fx.Node, options: OrtOptions) -> Support:
        """See `Backend.supports`."""
        from dynamo_backends.ort.compiler import compile_graph
        from dynamo_backends.ort.trial import find_verdict

        settings = _of_trials(node, options)
        make = lambda graph: compile_graph(graph, settings)  # noqa: E731
        return find_verdict(node, make, settings, options.cache).as_support

    def plan(self, graph: Graph, options: OrtOptions) -> Plan:
        """See `Backend.plan`. Calls on the CPU are tried together."""
        with suppress_and_log(None, "trying calls together"):
            self._try_together(graph, options)
        return super().plan(graph, options)

    def _try_together(self, graph: Graph, options: OrtOptions) -> None:
        from dynamo_backends.ort.compiler import compile_graph
        from dynamo_backends.ort.trial import try_together

        calls = [node for node in graph.calls if isinstance(node.target, OpOverload)]
        alike: dict[Any, list[fx.Node]] = {}
        for node in calls:
            alike.setdefault(_of_trials(node, options), []).append(node)
        for settings, nodes in alike.items():
            if settings.device[0] == "cpu":
                make = functools.partial(compile_graph, settings=settings)
                try_together(nodes, make, settings, options.cache)

    def compile(self, graph: Graph, options: OrtOptions) -> Any:
        """See `Backend.compile`."""
        if options.is_int8:
            from dynamo_backends.ort.quantized import OrtInt8Executable

            return OrtInt8Executable(graph, _settings_of(graph, options), options.precision)
        from dynamo_backends.ort.compiler import compile_graph

        return compile_graph(graph, _settings_of(graph, options))

    def cache_key(self, options: OrtOptions) -> str:
        """See `Backend.cache_key`."""
        from dynamo_backends.runtime.cache import source_digest

        return f"{self.versions()} {source_digest()}"

    def load(self, parts: Mapping[str, bytes], graph: Graph, options: OrtOptions) -> Any:
        """See `Backend.load`."""
        from dynamo_backends.ort.compiler import load

        return load(parts, graph, _settings_of(graph, options))


class OnnxRuntimeCPU(OnnxRuntime):
    """The backend `onnxrt_cpu`: takes graphs on the CPU only."""

    name = "onnxrt_cpu"
    summary = "ONNX Runtime on the CPU"
    same_as = "onnxrt"
    devices = ("cpu",)


class OnnxRuntimeCUDA(OnnxRuntime):
    """The backend `onnxrt_cuda`: takes graphs on CUDA devices only."""

    name = "onnxrt_cuda"
    summary = "ONNX Runtime on CUDA devices"
    same_as = "onnxrt"
    devices = ("cuda",)


def _settings_of(graph: Graph, options: OrtOptions) -> Any:
    return _settings((*graph.placeholders, *graph.calls), options)


def _settings(nodes: Iterable[fx.Node], options: OrtOptions) -> Any:
    from dynamo_backends.ort.session import SessionSettings

    index = find_device_index(nodes, "cuda")
    device = ("cpu", 0) if index is None else ("cuda", index)
    return SessionSettings(
        providers=_providers(device, options),
        device=device,
        threads=options.intra_op_threads,
        level=options.graph_optimization_level,
        config=tuple(sorted((options.session_config or {}).items())),
        graphs=options.cudagraphs and device[0] == "cuda",
    )


def _providers(device: tuple[str, int], options: OrtOptions) -> tuple[cuda.Provider, ...]:
    """Returns the execution providers of a device with their options, the preferred first."""
    given = options.provider_options or {}
    if device[0] == "cpu":
        return ((cuda.CPU, tuple(sorted(given.items()))),)
    index, graphs = device[1], options.cudagraphs
    tensorrt = options.provider == "tensorrt"
    search = cuda.is_cudnn_benchmark_on()
    own = cuda.cuda_provider_options(index, read_tf32_settings(), search, graphs and not tensorrt)
    found = [(cuda.CUDA, own), (cuda.CPU, {})]
    if tensorrt:
        folder = vendor_folder("onnxrt-tensorrt") if options.cache else None
        found.insert(0, (cuda.TENSORRT, cuda.tensorrt_provider_options(index, folder, graphs)))
    found[0] = (found[0][0], {**found[0][1], **given})
    return tuple((name, tuple(sorted(entries.items()))) for name, entries in found)


def _of_trials(node: fx.Node, options: OrtOptions) -> Any:
    """Settings for trying a call.

    One for which there is no kernel on the device is left to torch, which has one, rather than
    computed on the host.
    """
    alone = dataclasses.replace(options, cudagraphs=False, provider="cuda")
    settings = _settings((node, *node.all_input_nodes), alone)
    if settings.device[0] == "cuda":
        config = tuple(sorted({**dict([cuda.NO_HOST]), **dict(settings.config)}.items()))
        settings = dataclasses.replace(settings, providers=settings.providers[:1], config=config)
    return dataclasses.replace(settings, threads=1)


def _check_tensorrt(options: OrtOptions, backend: str) -> None:
    """Raises if TensorRT's provider is missing, or torch forbids TF32, which it needs."""
    if options.provider != "tensorrt":
        return
    from dynamo_backends.ort.session import available_providers

    if cuda.TENSORRT not in available_providers():
        raise DeviceError(
            f"{backend} was called with provider='tensorrt', but the installed onnxruntime does "
            f"not have this provider; run: {_INSTALL_CUDA} tensorrt"
        )
    if not read_tf32_settings().products:
        raise OptionError(
            f"{backend} was called with provider='tensorrt', which computes float32 products in "
            "TF32, but torch does not allow TF32. Call torch.set_float32_matmul_precision('high'), "
            "or use backend='tensorrt', which follows that setting."
        )


def _has_device(kind: str) -> bool:
    from dynamo_backends.ort.session import available_providers

    here = kind == "cpu" or torch.cuda.is_available()
    return here and _PROVIDER[kind] in available_providers()


def _why_no_cuda() -> tuple[str, str]:
    """Returns what stands in the way of CUDA, and what fixes it."""
    from dynamo_backends.ort.session import available_providers

    if _PROVIDER["cuda"] not in available_providers():
        return "the installed onnxruntime has no CUDA provider", _INSTALL_CUDA
    return "torch sees no CUDA device", "nvidia-smi"
