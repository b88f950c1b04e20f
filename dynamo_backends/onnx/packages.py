"""What the lowering to ONNX needs."""

PACKAGES = {
    "onnxruntime": "onnxruntime",
    "onnx": "onnx",
    "onnx_ir": "onnx-ir",
    "onnxscript": "onnxscript",
}
"""Modules, each with the package on the index that has it."""
