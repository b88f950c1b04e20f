"""The backend `tensorrt`: NVIDIA TensorRT on torch's memory and streams."""

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from torch import fx

from dynamo_backends._torch_private import OpOverload
from dynamo_backends.graph.graph import Graph, find_device_index, find_input_off_device
from dynamo_backends.interface.backend import Availability, Backend
from dynamo_backends.interface.errors import DeviceError, OptionError
from dynamo_backends.interface.plan import Plan
from dynamo_backends.onnx import PACKAGES
from dynamo_backends.trt import vendor
from dynamo_backends.trt.device import driver
from dynamo_backends.trt.options import TensorRTOptions


class TensorRT(Backend):
    """See the module's docstring."""

    name = "tensorrt"
    summary = "NVIDIA TensorRT"
    Options = TensorRTOptions
    trains = True
    dynamic_shapes = "one engine per shape range"
    serves_ranges = True
    packages: ClassVar[Mapping[str, str]] = {**PACKAGES, "tensorrt": "tensorrt"}
    optional_packages = ("onnxruntime-*", "tensorrt-cu*")
    install = "pip install 'dynamo-backends[tensorrt]'"

    def __init__(self) -> None:
        self._surveys: Any = None

    def availability(self) -> Availability:
        """See `Backend.availability`."""
        if no := self.check_packages():
            return no
        reason = vendor.why_unavailable()
        if reason is not None:
            return Availability(False, reason, self.install)
        reason = driver().why_not()
        if reason is not None:
            return Availability(False, reason, driver().remedy())
        version = vendor.tensorrt().__version__
        return Availability(True, f"TensorRT {version}", devices=(driver().kind,))

    def check_graph(self, graph: Graph, options: TensorRTOptions) -> None:
        """See `Backend.check_graph`."""
        require_device(graph, self.name)
        if vendor.tensorrt_version()[0] >= 11 and not options.strongly_typed:
            raise OptionError(
                f"option 'strongly_typed' of {self.name} must be True with TensorRT "
                f"{vendor.tensorrt().__version__}, because TensorRT 11 supports strongly typed "
                "networks only."
            )

    def preserved_operators(self, options: TensorRTOptions) -> Collection[OpOverload]:
        """See `Backend.preserved_operators`: whatever has a lowering that is used."""
        from dynamo_backends.onnx.exporter_lowerings import lowered_overloads

        return lowered_overloads()

    def decomposed_operators(self, options: TensorRTOptions) -> Collection[OpOverload]:
        """See `Backend.decomposed_operators`."""
        from dynamo_backends.onnx.exporter_lowerings import unlowered_overloads

        return unlowered_overloads()

    def plan(self, graph: Graph, options: TensorRTOptions) -> Plan:
        """See `Backend.plan`."""
        from dynamo_backends.trt.survey import Surveys

        if self._surveys is None:
            self._surveys = Surveys()
        plan: Plan = self._surveys(graph, _settings(graph, options))
        return plan

    def compile(self, graph: Graph, options: TensorRTOptions) -> Any:
        """See `Backend.compile`."""
        from dynamo_backends.trt.compiler import compile_graph

        return compile_graph(graph, _settings(graph, options))


def require_device(graph: Graph, name: str) -> None:
    """Raises `DeviceError` if an input is elsewhere than TensorRT can read it; numbers may be."""
    kind = driver().kind
    found = find_input_off_device(graph, kind)
    if found is not None:
        raise DeviceError(
            f"{name} runs on {kind.upper()} tensors, and an input is on {found.device.type}; "
            f"move the model and its inputs (model.to({kind!r})), or use backend='onnxrt' or "
            "another that runs there."
        )


def _settings(graph: Graph, options: TensorRTOptions) -> Any:
    from dynamo_backends.trt.engine_builder import Settings

    return Settings.of(options, device_index(graph.module.graph))


def device_index(graph: fx.Graph) -> int:
    """Index of the device that a graph's tensors are on."""
    return find_device_index(graph.nodes, driver().kind) or 0
