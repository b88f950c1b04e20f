"""The options of `tensorrt`."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from dynamo_backends.cudagraphs.options import CudaGraphOptions
from dynamo_backends.interface.errors import OptionError
from dynamo_backends.interface.options import Limits


@dataclass(frozen=True)
class TensorRTOptions(CudaGraphOptions):
    """The options of `tensorrt`, besides those of backends that can be run as CUDA graphs.

    Attributes:
        precision: Of products and convolutions of float32 tensors. "fp32": TF32 only where torch's
            own flags allow it for both matrix products and convolutions; "tf32": TF32 in any case;
            "fp16", "bf16": operands are rounded to that type, everything else stays float32.
        strongly_typed: Every tensor has the type that the graph gives it. False lets TensorRT 10
            choose types up to `precision` for every layer; TensorRT 11 has no such networks.
        optimization_level: How long TensorRT searches for fast kernels, 0 to 5.
        workspace: Maximum scratch memory of a kernel in bytes; 0: all available memory.
        hardware_compatibility: Engines for this GPU only, for all GPUs of the same compute
            capability, or for all from Ampere on.
        version_compatible: Engines that later versions of TensorRT can run.
        weight_streaming: Bytes of weights that stay on the device; the others are streamed from the
            host at each call. -1: all stay on the device; 0: TensorRT decides how many stay.
        max_size: With dynamic shapes: largest size that an engine supports, as a multiple of the
            size of the first call, in dimensions that have no upper bound (see
            `torch._dynamo.mark_dynamic`).
        beyond_profile: With dynamic shapes: what happens to a size that no engine serves. "rebuild"
            builds one for the wider range; with "refuse" such calls run in eager, or raise
            `FallbackRefusedError` with `fallback="error"`.
        timing_cache: Keep the measured times of kernels on disk, so that later builds are faster.
    """

    precision: Literal["fp32", "tf32", "fp16", "bf16"] = "fp32"
    strongly_typed: bool = True
    optimization_level: int = 3
    workspace: int = 0
    hardware_compatibility: Literal["none", "same_compute_capability", "ampere_plus"] = "none"
    version_compatible: bool = False
    weight_streaming: int = -1
    max_size: int = 8
    beyond_profile: Literal["rebuild", "refuse"] = "rebuild"
    timing_cache: bool = True

    LIMITS: ClassVar[Limits] = {
        "optimization_level": (0, 5),
        "workspace": (0, None),
        "weight_streaming": (-1, None),
        "max_size": (1, None),
    }

    def validate(self, backend: str) -> None:
        """See `Options.validate`."""
        super().validate(backend)
        if self.weight_streaming >= 0 and not self.strongly_typed:
            raise OptionError(
                f"option 'weight_streaming' of {backend} needs strongly_typed=True, because "
                "TensorRT streams only weights of strongly typed networks."
            )
