"""ATen graphs as ONNX models, for every backend whose vendor reads ONNX."""

PACKAGES = {
    "onnxruntime": "onnxruntime",
    "onnx": "onnx",
    "onnx_ir": "onnx-ir",
    "onnxscript": "onnxscript",
}
"""Modules, each with the package on the index that has it."""
