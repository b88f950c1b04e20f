"""The backends `onnxrt`, `onnxrt_cpu` and `onnxrt_cuda`, and `save`."""

from typing import Any

from dynamo_backends.interface.compiler import compiler

onnxrt = compiler("onnxrt")
onnxrt_cpu = compiler("onnxrt_cpu")
onnxrt_cuda = compiler("onnxrt_cuda")

__all__ = ["onnxrt", "onnxrt_cpu", "onnxrt_cuda", "save"]


def __getattr__(name: str) -> Any:
    if name == "save":  # loaded late: it needs torch's insides and onnx
        from dynamo_backends.ort.saving import save

        return save
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
