"""ATen graphs as ONNX models, for every backend whose vendor reads ONNX."""
