"""The backend `ov`: OpenVINO on torch's memory."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import fx

from dynamo_backends._torch_private import OpOverload
from dynamo_backends.graph.graph import Graph, require_cpu_inputs
from dynamo_backends.int8.options import NNCF, Int8Options, require_quantizer
from dynamo_backends.interface.backend import RANGED, Availability, Backend
from dynamo_backends.interface.errors import (
    DeviceError,
    OptionError,
    did_you_mean,
    suppress_and_log,
)
from dynamo_backends.interface.options import Limits
from dynamo_backends.interface.plan import Plan, Support


@dataclass(frozen=True)
class OpenVinoOptions(Int8Options):
    """The options of `ov`: device, precision, threads and OpenVINO's own properties.

    Attributes:
        device: Name of the OpenVINO device that runs graphs: "CPU", "GPU", "GPU.1", "NPU".
            Inputs and outputs are CPU tensors for every device.
        precision: "float32" computes in the dtypes that the model has; "bf16" lets OpenVINO compute
            in bfloat16 where the processor has instructions for it. With NNCF, "int8" quantizes
            linear layers and convolutions, with scales from `calibration`; "int8-weights" weights
            alone. Both need `tolerance` (docs/int8.md).
        performance_hint: What OpenVINO optimizes: the latency of one call, or the throughput of
            calls from several threads.
        num_threads: Number of OpenVINO's threads on the CPU; 0: as many as torch uses.
        config: Properties of the device, such as `{"ENABLE_HYPER_THREADING": False}`; names and
            values are those of OpenVINO. They take precedence over the options above.
    """

    device: str = "CPU"
    precision: Literal["float32", "bf16", "int8", "int8-weights"] = "float32"
    performance_hint: Literal["latency", "throughput"] = "latency"
    num_threads: int = 0
    config: dict[str, Any] | None = None

    LIMITS: ClassVar[Limits] = {"num_threads": (0, None)}

    def validate(self, backend: str) -> None:
        """See `Options.validate`."""
        super().validate(backend)
        for key, value in (self.config or {}).items():
            if not isinstance(key, str) or not isinstance(value, str | bool | int | float):
                raise OptionError(
                    f"option 'config' of {backend} must map names of OpenVINO properties to "
                    f"strings, numbers or bools; {key!r}: {value!r} is invalid."
                )


class OpenVINO(Backend):
    """Compiles graphs with OpenVINO, whose tensors share torch's memory."""

    name = "ov"
    summary = "OpenVINO"
    Options = OpenVinoOptions
    dynamic_shapes = RANGED
    serves_ranges = True
    depends_on_ranges = False
    trains = True
    packages: ClassVar[Mapping[str, str]] = {"openvino": "openvino"}
    install = "pip install 'dynamo-backends[openvino]'"

    def availability(self) -> Availability:
        """See `Backend.availability`."""
        if no := self.check_packages():
            return no
        return Availability(True, f"OpenVINO {self.versions()['openvino']}", devices=("cpu",))

    def check_graph(self, graph: Graph, options: OpenVinoOptions) -> None:
        """Checks device, `config` and quantizer (see `Backend.check_graph`)."""
        if options.is_int8:
            require_quantizer(NNCF, self.name)
        _check_device(options.device)
        _check_config(options)
        require_cpu_inputs(graph, "ov", " To run on OpenVINO's GPU device, set device='GPU'.")

    def preserved_operators(self, options: OpenVinoOptions) -> Collection[OpOverload]:
        """Returns the composite operators that OpenVINO's frontend converts best whole."""
        from dynamo_backends.openvino.exclusions import undecomposed_operators

        return undecomposed_operators()

    def supports(self, node: fx.Node, options: OpenVinoOptions) -> Support:
        """Returns whether OpenVINO runs a call as eager does, found by trying it on samples."""
        from dynamo_backends.openvino.trial import support_by_trial

        return support_by_trial(node, _of_trials(options), options.cache)

    def plan(self, graph: Graph, options: OpenVinoOptions) -> Plan:
        """See `Backend.plan`; first tries all calls of the graph in one model, to save time."""
        from dynamo_backends.openvino.trial import try_calls_together

        calls = [node for node in graph.calls if isinstance(node.target, OpOverload)]
        with suppress_and_log(None, "trying calls together"):
            try_calls_together(calls, _of_trials(options), options.cache)
        return super().plan(graph, options)

    def compile(self, graph: Graph, options: OpenVinoOptions) -> Any:
        """See `Backend.compile`."""
        if options.is_int8:
            from dynamo_backends.openvino.quantized import OpenVinoInt8Executable

            return OpenVinoInt8Executable(graph, _settings(options), options.precision)
        from dynamo_backends.openvino.compiler import compile_graph

        return compile_graph(graph, _settings(options))

    def cache_key(self, options: OpenVinoOptions) -> str:
        """Returns versions, device name and thread count, on which compiled models depend."""
        from dynamo_backends.openvino.core_api import device_full_name
        from dynamo_backends.runtime.cache import source_digest

        device = device_full_name(options.device)
        return f"{self.versions()} {source_digest()} {device} {torch.get_num_threads()}"

    def load(self, parts: Mapping[str, bytes], graph: Graph, options: OpenVinoOptions) -> Any:
        """See `Backend.load`."""
        from dynamo_backends.openvino.compiler import load_executable

        return load_executable(parts, graph, _settings(options))


def _settings(options: OpenVinoOptions) -> Any:
    from dynamo_backends.openvino.core_api import CompileSettings

    return CompileSettings(
        device=options.device,
        precision="float32" if options.is_int8 else options.precision,
        hint=options.performance_hint,
        threads=options.num_threads,
        config=tuple(sorted((options.config or {}).items())),
    )


def _of_trials(options: OpenVinoOptions) -> Any:
    """Returns settings for trials: float32 on one thread.

    One thread: trials are small. In float32: a lower precision is no mistake of a conversion.
    """
    return replace(_settings(options), threads=1, precision="float32")


def _check_device(device: str) -> None:
    """Raises `DeviceError` if OpenVINO does not find a device here."""
    from dynamo_backends.openvino.core_api import available_devices

    found = available_devices()
    # "GPU" is the first of "GPU.0", "GPU.1".
    if not any(name == device or name.partition(".")[0] == device for name in found):
        raise DeviceError(
            f"device={device!r} is not available: OpenVINO finds {', '.join(found)} here. Choose "
            f"one of these, or install the driver that OpenVINO needs for {device}."
        )


def _check_config(options: OpenVinoOptions) -> None:
    """Raises `OptionError` for names in `config` that are no properties of the device."""
    from dynamo_backends.openvino.core_api import writable_properties

    known = writable_properties(options.device) if options.config else ()
    for name in options.config or {}:
        if name not in known:
            hint = did_you_mean(name, known)
            raise OptionError(
                f"OpenVINO's {options.device} device has no settable property {name!r}.{hint} "
                f"Settable properties: {', '.join(sorted(known))}."
            )
