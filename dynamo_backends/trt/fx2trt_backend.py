"""The backend `fx2trt`: torch_tensorrt's Dynamo compiler behind this package's pipeline.

torch_tensorrt converts ATen calls to TensorRT's layers one by one, without ONNX. Here it gets the
blocks of calls that it has converters for; fallback, frozen weights, dynamic shapes, verification
and reports are the pipeline's.
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, fx

from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.precision import read_tf32_settings
from dynamo_backends.interface.backend import Availability, Backend
from dynamo_backends.interface.errors import first_line, reraise_as_compile_error
from dynamo_backends.interface.options import Limits, Options
from dynamo_backends.interface.plan import SUPPORTED, Support
from dynamo_backends.runtime.prepared_executables import PreparedExecutable, Run
from dynamo_backends.trt.backend import device_index, require_device
from dynamo_backends.trt.device import driver
from dynamo_backends.trt.precision import DTYPES, reduce_precision
from dynamo_backends.verify.trials.call_trials import why_untriable

_VENDOR = "torch_tensorrt"


@dataclass(frozen=True)
class Fx2TRTOptions(Options):
    """The options of `fx2trt`, besides those that every backend has.

    Attributes:
        precision: As for `tensorrt`.
        optimization_level: How long TensorRT searches for fast kernels, 0 to 5.
        workspace: Maximum scratch memory of a kernel in bytes; 0: all available memory.
        hardware_compatible: Engines for all GPUs from Ampere on.
        version_compatible: Engines that later versions of TensorRT can run.
    """

    precision: Literal["fp32", "tf32", "fp16", "bf16"] = "fp32"
    optimization_level: int = 3
    workspace: int = 0
    hardware_compatible: bool = False
    version_compatible: bool = False

    LIMITS: ClassVar[Limits] = {"optimization_level": (0, 5), "workspace": (0, None)}


class Fx2TRT(Backend):
    """See the module's docstring."""

    name = "fx2trt"
    summary = "TensorRT through torch_tensorrt's converters"
    Options = Fx2TRTOptions
    trains = True
    packages: ClassVar[Mapping[str, str]] = {"torch_tensorrt": "torch-tensorrt"}
    optional_packages = ("tensorrt", "tensorrt-cu*")
    install = "pip install torch-tensorrt"

    def availability(self) -> Availability:
        """See `Backend.availability`."""
        try:
            if importlib.util.find_spec("torch_tensorrt") is None:
                return Availability(
                    False,
                    "torch_tensorrt is not installed ('tensorrt' needs TensorRT alone)",
                    self.install,
                )
            version = _vendor().__version__
        except Exception as error:  # it loads TensorRT's libraries
            reason = f"torch_tensorrt cannot be imported ({first_line(error)})"
            return Availability(False, reason, self.install)
        missing = driver().why_not()
        if missing is not None:
            return Availability(False, missing, driver().remedy())
        return Availability(True, f"torch_tensorrt {version}", devices=(driver().kind,))

    def check_graph(self, graph: Graph, options: Fx2TRTOptions) -> None:
        """See `Backend.check_graph`."""
        require_device(graph, self.name)

    def supports(self, node: fx.Node, options: Fx2TRTOptions) -> Support:
        """See `Backend.supports`: what torch_tensorrt has a converter for."""
        reason = why_untriable(node, _VENDOR)
        if reason is not None:
            return Support(False, reason)
        value = node.meta["val"]
        values = [n.meta["val"] for n in node.all_input_nodes]
        for tensor in (*(value if isinstance(value, list | tuple) else (value,)), *values):
            if isinstance(tensor, Tensor) and tensor.dtype == torch.float64:
                return Support(False, f"TensorRT does not compute with {tensor.dtype}")
        if node not in _converters():
            return Support(False, f"{_VENDOR} has no converter for it")
        return SUPPORTED

    def compile(self, graph: Graph, options: Fx2TRTOptions) -> Any:
        """See `Backend.compile`."""
        return _Converted(graph, options)


class _Converted(PreparedExecutable):
    """A block that torch_tensorrt has compiled, with its weights as constants."""

    def __init__(self, graph: Graph, options: Fx2TRTOptions):
        reduced = DTYPES.get(options.precision)
        self._source = graph if reduced is None else reduce_precision(graph, reduced)
        self._options = options
        self._device = torch.device(driver().kind, device_index(graph.module.graph))
        super().__init__(graph)

    def prepare(self, weights: Sequence[Tensor]) -> Run:
        """See `PreparedExecutable.prepare`."""
        constants = dict(zip(self._source.weights, weights, strict=False))  # none of them: live
        module, examples, reads = _module(self._source, constants, self._device)
        with reraise_as_compile_error(f"{_VENDOR} cannot compile the block", first_line):
            compiled = _vendor().compile(
                module, ir="dynamo", inputs=examples, **_settings(self._options, self._device)
            )
        return _calling(compiled, reads)


def _calling(compiled: Callable[..., Any], reads: Sequence[int]) -> Run:
    def run(*values: Any) -> Sequence[Any]:
        results = compiled(*[values[i] for i in reads])
        return results if isinstance(results, list | tuple) else (results,)

    return run


def _module(
    graph: Graph, weights: dict[int, Tensor], device: torch.device
) -> tuple[fx.GraphModule, list[Tensor], list[int]]:
    """Returns a module with the given weights as buffers.

    Returns:
        The module, examples of its inputs, and which of the values of a call they are.
    """
    copied = fx.Graph()
    attributes: dict[str, Tensor] = {}
    copies: dict[fx.Node, fx.Node] = {}
    examples, reads = [], []
    given = [i for i in range(len(graph.inputs)) if i not in weights]
    for i, node in enumerate(graph.placeholders):
        value = node.meta["val"]
        if i in weights:
            attributes[f"weight_{i}"] = weights[i]
            copies[node] = copied.get_attr(f"weight_{i}")
        elif isinstance(value, Tensor):
            copies[node] = copied.placeholder(node.name)
            examples.append(torch.zeros(value.shape, dtype=value.dtype, device=device))
            reads.append(given.index(i))
    owner = torch.nn.Module()
    for name, tensor in attributes.items():
        owner.register_buffer(name, tensor)
    for node in graph.calls:
        copies[node] = copied.node_copy(node, copies.__getitem__)
    copied.output(tuple(copies[n] for n in graph.outputs))
    return fx.GraphModule(owner, copied), examples, reads


def _settings(options: Fx2TRTOptions, device: torch.device) -> dict[str, Any]:
    tf32 = options.precision == "tf32" or read_tf32_settings().allowed_everywhere
    return {
        "device": device,
        "disable_tf32": not tf32,
        "hardware_compatible": options.hardware_compatible,
        "min_block_size": 1,  # the pipeline has seen to it
        "optimization_level": options.optimization_level,
        "pass_through_build_failures": True,
        "truncate_double": False,
        "use_explicit_typing": True,
        "version_compatible": options.version_compatible,
        "workspace_size": options.workspace,
    }


def _vendor() -> Any:
    return importlib.import_module("torch_tensorrt")


def _converters() -> Any:
    """torch_tensorrt's converters; whether a node is in them depends on its arguments too."""
    module = importlib.import_module("torch_tensorrt.dynamo.conversion._ConverterRegistry")
    return module.DYNAMO_CONVERTERS
