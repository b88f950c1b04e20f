"""A double of NVIDIA TensorRT that computes: a module with the names that the backend uses.

It has the surface of versions 10.16 and 11.4, as far as it is used. Engines execute their ONNX
models with ONNX Runtime on the CPU, reading and writing torch's memory through addresses. All that
is passed is checked, and what the vendor would refuse or what it leaves undefined is an error here:
names, types, ranges of profiles, addresses, streams, and memory that is gone.

Sources: the signatures of the Python bindings' own docstrings (tests/trt/test_surface.py compares
them where the bindings are installed), NVIDIA's API reference, and the operator table of
onnx-tensorrt (docs/operators.md, version 10.15).
"""

from tests.doubles.tensorrt.device import HostDevice
from tests.doubles.tensorrt.module import make

__all__ = ["HostDevice", "make"]
