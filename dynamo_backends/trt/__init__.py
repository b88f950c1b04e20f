"""The backends `tensorrt` and `fx2trt`, and `save` and `load` of engines."""

from typing import Any

from dynamo_backends.interface.compiler import compiler

fx2trt = compiler("fx2trt")
tensorrt = compiler("tensorrt")

__all__ = ["fx2trt", "load", "save", "tensorrt"]


def __getattr__(name: str) -> Any:
    if name in ("load", "save"):  # loaded late: they need onnx
        from dynamo_backends.trt import store

        return getattr(store, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
