"""The backend names that were in use before, and what became of each.

TorchDynamo began with some forty backends; torch kept a few of the names, and lists elsewhere (such
as `DynamoBackend` of Hugging Face's accelerate) still offer others. Each resolves to the backend
that does its work today, which one log line says, or to an error that says what became of it.
"""

import functools
import logging
from dataclasses import dataclass
from typing import Literal

from dynamo_backends.interface.errors import UnknownBackendError

log = logging.getLogger("dynamo_backends")

Owner = Literal["here", "torch", "nobody"]


@dataclass(frozen=True)
class OldName:
    """A name and what became of it.

    Attributes:
        name: What users write.
        target: The backend that stands for it today; "" if none does.
        owner: Whose backend that is: this package's or torch's own.
        why: What became of the name, a sentence without a full stop.
    """

    name: str
    target: str
    owner: Owner
    why: str


_NVFUSER = "torch has removed nvFuser from TorchScript"
_PRIMS = "torch has removed nvFuser's primitives"
_XLA = "one backend compiles with XLA and traces once; it needs no torch_xla"
_CUDAGRAPHS = "it records the kernels that torch launches; TorchScript would launch the same ones"
_TENSORRT = "one backend builds TensorRT engines, whichever way the network gets there"

OLD_NAMES: tuple[OldName, ...] = (
    OldName("ansor", "tvm", "here", "Ansor's successor in TVM is MetaSchedule"),
    OldName("aot_autograd", "", "nobody", "it is no backend but an adapter for backend authors: "
            "`torch._dynamo.backends.common.aot_autograd`"),
    OldName("aot_cudagraphs", "cudagraphs", "torch", "torch has renamed it"),
    OldName("aot_inductor_debug", "inductor", "torch", "set TORCH_COMPILE_DEBUG=1 for its output"),
    OldName("aot_nvfuser", "nvfuser", "here", _NVFUSER),
    OldName("aot_print", "", "nobody", 'it printed graphs; set TORCH_LOGS="aot_graphs" and use '
            "any backend, or call `dynamo_backends.explain`"),
    OldName("aot_torchxla_trace_once", "openxla", "here", _XLA),
    OldName("aot_torchxla_trivial", "openxla", "here", _XLA),
    OldName("aot_ts", "aot_ts", "torch", "torch still has it"),
    OldName("aot_ts_nvfuser", "nvfuser", "here", _NVFUSER),
    OldName("aot_ts_nvfuser_nodecomps", "nvfuser", "here", _NVFUSER),
    OldName("autotune", "autotune", "here", "it measures backends and takes the fastest"),
    OldName("cudagraphs", "cudagraphs", "torch", "torch still has it"),
    OldName("cudagraphs_ts", "cudagraphs_eager", "here", _CUDAGRAPHS),
    OldName("cudagraphs_ts_ofi", "cudagraphs_eager", "here", _CUDAGRAPHS),
    OldName("fx2trt", "fx2trt", "here", "torch_tensorrt is what became of it; 'tensorrt' needs "
            "TensorRT alone"),
    OldName("ipex", "", "nobody", "Intel Extension for PyTorch registers it when it is imported "
            "(`import intel_extension_for_pytorch`); without it, 'inductor_freezing' and "
            "'onednn_graph' reach the same oneDNN kernels"),
    OldName("ltc_reuse_graph", "ltc", "here", "renamed"),
    OldName("ltc_trivial", "ltc_trace", "here", "renamed"),
    OldName("nnc", "nnc", "here", "as before"),
    OldName("nnc_ofi", "nnc", "here", "NNC compiles what `optimize_for_inference` would rewrite"),
    OldName("nvfuser", "nvfuser", "here", "nvFuser is a package of its own by now"),
    OldName("nvfuser_ofi", "nvfuser", "here", _NVFUSER),
    OldName("nvprims_aten", "", "nobody", f"{_PRIMS}; it ran them without nvFuser, for debugging, "
            "which is what 'aot_eager' is for"),
    OldName("nvprims_nvfuser", "nvfuser", "here", _PRIMS),
    OldName("ofi", "ofi", "here", "as before"),
    OldName("onednn", "onednn_graph", "here", "renamed"),
    OldName("onnx2tensorrt", "tensorrt", "here", _TENSORRT),
    OldName("onnx2tensorrt_alt", "tensorrt", "here", _TENSORRT),
    OldName("onnx2tf", "onnxrt", "here", "it ran ONNX models in TensorFlow; ONNX Runtime runs them "
            "itself"),
    OldName("onnxrt", "onnxrt", "here", "as before; torch has an empty place under this name"),
    OldName("onnxrt_cpu", "onnxrt_cpu", "here", "as before"),
    OldName("onnxrt_cpu_numpy", "onnxrt_cpu", "here", "tensors are shared without numpy"),
    OldName("onnxrt_cuda", "onnxrt_cuda", "here", "as before"),
    OldName("static_runtime", "static_runtime", "here", "as before"),
    OldName("taso", "", "nobody", "TASO is a finished research project that no current toolchain "
            "builds; 'inductor' and 'onnxrt' rewrite graphs as well"),
    OldName("tensorrt", "tensorrt", "here", "as before"),
    OldName("torch2trt", "tensorrt", "here", _TENSORRT),
    OldName("torchxla_trace_once", "openxla", "here", _XLA),
    OldName("torchxla_trivial", "openxla", "here", _XLA),
    OldName("ts", "ts", "torch", "torch still has it; 'ts_trace' is the same on ATen graphs"),
    OldName("ts_nvfuser", "nvfuser", "here", _NVFUSER),
    OldName("ts_nvfuser_ofi", "nvfuser", "here", _NVFUSER),
    OldName("tvm", "tvm", "here", "torch's own function of that name calls what TVM has removed"),
    OldName("tvm_meta_schedule", "tvm", "here", "one backend; its option `tune_trials` tunes"),
)  # fmt: skip


OLD_BY_NAME = {old.name: old for old in OLD_NAMES}


def resolve(name: str) -> str | None:
    """The backend of this package that stands for an old name; None if the name is not an old one.

    Raises:
        UnknownBackendError: No backend of this package does; the message says what became of it.
    """
    old = OLD_BY_NAME.get(name)
    if old is None:
        return None
    if old.owner == "here":
        announce(old)
        return old.target
    raise UnknownBackendError(explain(old))


def explain(old: OldName) -> str:
    """Returns what became of a name, as a message for somebody who has asked for it."""
    if old.owner == "nobody":
        return f"there is no backend {old.name!r} any more: {old.why}."
    if old.owner == "torch":
        return f"{old.name!r} is torch's own backend {old.target!r} today: {old.why}."
    return f"{old.name!r} is {old.target!r} today: {old.why}."


@functools.cache
def announce(old: OldName) -> None:
    """Says once what an old name is today, if it is another one."""
    if old.name != old.target:
        log.warning("%s", explain(old))
