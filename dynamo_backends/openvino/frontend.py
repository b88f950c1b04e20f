"""What OpenVINO's PyTorch frontend sees of a graph, and which node it gave up on."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, fx
from torch.fx.passes.shape_prop import TensorMetadata

from dynamo_backends.interface.errors import error_lines
from dynamo_backends.openvino.vendor import FrontEndManager, Model, TorchFXPythonDecoder


def convert_to_model(module: fx.GraphModule, shapes: Mapping[str, Sequence[int]]) -> Model:
    """Converts an ATen graph to a model with OpenVINO's PyTorch frontend.

    Args:
        module: Functional ATen calls. Its nodes' `meta` gets what the frontend reads.
        shapes: Of the placeholders, by name; -1: a size that differs from call to call. Of those
            without a shape, which are integers, the model makes scalars.

    Raises:
        ConversionError: The frontend has no rule for a call, or its rule refuses the arguments.
    """
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            node.meta["tensor_meta"] = _describe(value, shapes.get(node.name, value.shape))
        elif node.op == "placeholder" and isinstance(value, int):
            node.meta["tensor_meta"] = _describe(torch.empty((), dtype=torch.int64), ())
    frontend = FrontEndManager().load_by_framework("pytorch")
    decoder = TorchFXPythonDecoder(module)  # must live as long as the frontend reads it
    try:
        return frontend.convert(frontend.load(decoder))
    except Exception as error:
        raise ConversionError(_unconverted(module), summarize_error(error)) from error


class ConversionError(Exception):
    """Raised when OpenVINO's frontend cannot convert a graph.

    Attributes:
        node_name: Of the first FX node that has no conversion; None if the frontend names none.
        reason: The frontend's, in one line.
    """

    def __init__(self, node_name: str | None, reason: str):
        super().__init__(reason)
        self.node_name = node_name
        self.reason = reason


def _describe(value: Tensor, shape: Sequence[int]) -> TensorMetadata:
    return TensorMetadata(torch.Size(shape), value.dtype, False, value.stride(), None, False, {})


def _unconverted(module: fx.GraphModule) -> str | None:
    """Returns the name of the first FX node that the frontend did not convert."""
    frontend = FrontEndManager().load_by_framework("pytorch")
    decoder = TorchFXPythonDecoder(module)
    try:
        model = frontend.convert_partially(frontend.load(decoder))
    except Exception:  # some rules raise here too, which leaves the call unknown
        return None
    for operation in model.get_ordered_ops():
        if "FrameworkNode" in operation.get_type_name():
            # The decoder names operations "<FX node>/<operator>".
            name: str = operation.get_friendly_name().partition("/")[0]
            return name
    return None


_NOISE = ("Check '", "Exception", "While ", "FrontEnd ", "Model wasn't", "Summary", "-- ")


def summarize_error(error: BaseException) -> str:
    """Returns an OpenVINO error in one line, without source locations."""
    if "No conversion rule found" in str(error):
        return "OpenVINO has no conversion rule for it"
    lines = error_lines(error)
    told = [line for line in lines if not line.startswith(_NOISE)]
    return (told or lines)[-1][:200]
