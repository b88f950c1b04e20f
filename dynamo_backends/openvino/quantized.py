"""Blocks in int8 by NNCF, OpenVINO's own quantizer.

`nncf.quantize` for "int8", with scales of activations from batches; `nncf.compress_weights` for
"int8-weights", which keeps products in float32 and weights in 8 bits.
"""

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.graph.graph import Graph
from dynamo_backends.int8.executable import Activations, QuantizedExecutable, left_in_float
from dynamo_backends.int8.options import WEIGHTS, saturates
from dynamo_backends.interface.errors import CompileError, reraise_as_compile_error
from dynamo_backends.interface.executable import Bound
from dynamo_backends.interface.logs import silence_loggers
from dynamo_backends.openvino.core_api import CompileSettings, clone_with_constants, compile_model
from dynamo_backends.openvino.frontend import summarize_error
from dynamo_backends.openvino.lowering import lower_to_model
from dynamo_backends.openvino.runtime import OpenVinoExecutable
from dynamo_backends.openvino.vendor import (
    ConstantFolding,
    Manager,
    Model,
    Type,
    disabling_telemetry,
)

_PRODUCTS = frozenset({"Convolution", "GroupConvolution", "MatMul"})
_NORMALIZATIONS = frozenset({"MVN", "Softmax", "ScaledDotProductAttention"})
_lock = fork_safe_lock()  # what NNCF prints is held back for the process


class OpenVinoInt8Executable(QuantizedExecutable):
    """Runs a block that NNCF quantizes to int8 once calibration data is there.

    Args:
        graph: With static shapes.
        settings: How its models are compiled.
        precision: "int8" or "int8-weights".
    """

    def __init__(self, graph: Graph, settings: CompileSettings, precision: str):
        super().__init__(graph)
        self._precision = precision
        with reraise_as_compile_error("OpenVINO cannot compile the model", summarize_error):
            self._float = _Float(graph, lower_to_model(graph), settings)

    def prepare(self, weights: Sequence[Tensor], seen: Activations, in_float: float) -> Bound:
        """See `QuantizedExecutable.prepare`."""
        with reraise_as_compile_error("NNCF failed", summarize_error):
            return self._float.run_quantized(weights, seen, self._precision, in_float)


class _Float(OpenVinoExecutable):
    """Runs a block in float32, and makes the int8 model of it."""

    def run_quantized(
        self, weights: Sequence[Tensor], seen: Activations, precision: str, in_float: float
    ) -> Bound:
        """Returns what runs the model in int8.

        Args:
            weights: Weights of the block.
            seen: Activations of the batches that calibrate.
            precision: "int8" or "int8-weights".
            in_float: See `QuantizedExecutable.prepare`.
        """
        constants = self._dense(weights)
        model = clone_with_constants(self._model, constants)
        batches = [self._in_order(activations, tuple(constants)) for activations in seen]
        compiled = compile_model(
            quantize_model(model, batches, precision, in_float), self._settings
        )
        return self._run(compiled, tuple(constants), constants)

    def _in_order(self, activations: Sequence[Tensor], constants: Sequence[int]) -> list[Any]:
        """Returns activations in the model's input order, row-major, as NumPy arrays."""
        moved = self.renumber_inputs(constants)
        placed = {
            moved[x.place]: x.check.to_program_order(activations[x.at]).contiguous().numpy()
            for x in self._activations
        }
        return [placed[i] for i in sorted(placed)]


def quantize_model(
    model: Model, batches: Sequence[Sequence[Any]], precision: str, in_float: float = 0.0
) -> Model:
    """Quantizes a model to int8 with NNCF.

    Args:
        model: With its weights as constants.
        batches: Inputs in the model's order, which calibrate.
        precision: "int8" or "int8-weights".
        in_float: The part of its products, from the first one on, that stay in float32.

    Raises:
        CompileError: Nothing in it can be quantized.
    """
    with disabling_telemetry():
        import nncf

    folding = Manager()
    folding.register_pass(ConstantFolding())  # of weights that are transposed: NNCF takes constants
    folding.run_passes(model)
    before = _integers(model)
    with _lock, silence_loggers("nncf"), contextlib.redirect_stdout(io.StringIO()):
        if precision == WEIGHTS:
            found = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
        else:
            settings = _settings(model, len(batches), in_float)
            found = nncf.quantize(model, nncf.Dataset(list(batches)), **settings)
    fakes = any(op.get_type_name() == "FakeQuantize" for op in found.get_ordered_ops())
    if not fakes and _integers(found) == before:
        raise CompileError(
            "the graph has no linear layer or convolution with constant weights to quantize"
        )
    return found


def _integers(model: Model) -> int:
    """Returns how many constants of 8 bits a model has."""
    constants = [op for op in model.get_ordered_ops() if op.get_type_name() == "Constant"]
    return sum(op.get_element_type() in (Type.i8, Type.u8) for op in constants)


def _settings(model: Model, count: int, in_float: float) -> Mapping[str, Any]:
    import nncf

    products = [op for op in model.get_ordered_ops() if op.get_type_name() in _PRODUCTS]
    first = products[: left_in_float(in_float, len(products))]
    kinds = {op.get_type_name() for op in model.get_ordered_ops()}
    transformer = bool(kinds & _NORMALIZATIONS) and "Convolution" not in kinds
    fix = nncf.OverflowFix.ENABLE if saturates() else nncf.OverflowFix.DISABLE
    return {
        "preset": nncf.QuantizationPreset.MIXED,
        "target_device": nncf.TargetDevice.CPU,
        "model_type": nncf.ModelType.TRANSFORMER if transformer else None,
        "subset_size": count,
        "ignored_scope": nncf.IgnoredScope(names=[op.get_friendly_name() for op in first]),
        "advanced_parameters": nncf.AdvancedQuantizationParameters(overflow_fix=fix),
    }
