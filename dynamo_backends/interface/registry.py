"""Looks up and loads backends by name, including legacy names."""

import functools
import importlib
import importlib.metadata
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.interface.backend import Availability, Backend
from dynamo_backends.interface.errors import (
    BackendUnavailableError,
    UnknownBackendError,
    brief_error,
    did_you_mean,
)

ENTRY_POINT_GROUP = "torch_dynamo_backends"

_OURS: dict[str, str] = {
    "autotune": "dynamo_backends.autotune.backend:Autotune",
    "cudagraphs_eager": "dynamo_backends.cudagraphs.backend:CudaGraphsEager",
    "fx2trt": "dynamo_backends.trt.fx2trt_backend:Fx2TRT",
    "inductor_freezing": "dynamo_backends.inductor.backend:InductorFreezing",
    "inductor_max_autotune": "dynamo_backends.inductor.backend:InductorMaxAutotune",
    "iree": "dynamo_backends.iree.backend:IREE",
    "ltc": "dynamo_backends.lazy.backend:LazyTensorCore",
    "ltc_trace": "dynamo_backends.lazy.backend:LazyTensorCoreTrace",
    "nnc": "dynamo_backends.torchscript.backend:NNC",
    "nvfuser": "dynamo_backends.nvfuser.backend:NvFuser",
    "nvfuser_cudagraphs": "dynamo_backends.cudagraphs.backend:nvfuser_cudagraphs",
    "ofi": "dynamo_backends.torchscript.backend:Ofi",
    "onednn_graph": "dynamo_backends.torchscript.backend:OneDNNGraph",
    "onnxrt": "dynamo_backends.ort.backend:OnnxRuntime",
    "onnxrt_cpu": "dynamo_backends.ort.backend:OnnxRuntimeCPU",
    "onnxrt_cuda": "dynamo_backends.ort.backend:OnnxRuntimeCUDA",
    "openxla": "dynamo_backends.xla.backend:OpenXLA",
    "static_runtime": "dynamo_backends.torchscript.backend:StaticRuntime",
    "tensorrt": "dynamo_backends.trt.backend:TensorRT",
    "ts_trace": "dynamo_backends.torchscript.backend:TsTrace",
    "tvm": "dynamo_backends.tvm.backend:TVM",
    "ov": "dynamo_backends.openvino.backend:OpenVINO",
}
_registered: dict[str, Callable[[], Backend]] = {}
_lock = fork_safe_lock()


def list_backends() -> list[str]:
    """Returns all backend names, of this package and registered ones, sorted."""
    return sorted({*_OURS, *_registered})


def is_backend(name: str) -> bool:
    """Returns whether a name is a backend's, of this package or registered."""
    return name in _OURS or name in _registered


def is_loadable_by_name(backend: Backend) -> bool:
    """Returns whether a new process can load this backend by its name."""
    return backend.name in _OURS and get_backend(backend.name) is backend


def third_party_backends() -> list[str]:
    """Returns names of backends that other packages declare as entry points."""
    points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    return sorted(
        p.name for p in points if p.name not in _OURS and not p.value.startswith("dynamo_backends.")
    )


def third_party_version(name: str) -> tuple[str, str] | None:
    """Returns package name and version of a third-party backend; None for others."""
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=name):
        if name in third_party_backends() and point.dist is not None:
            return point.dist.name, point.dist.version
    return None


def register_backend(name: str, factory: Callable[[], Backend]) -> None:
    """Registers a backend under a name, for `get_backend` and `compiler`.

    Args:
        name: What users will write. Packages that want `torch.compile(backend=name)` to work
            without an import add an entry point too (see docs/backends.md).
        factory: Makes the backend; called once, on first use.

    Raises:
        ValueError: The name is taken.
    """
    with _lock:
        if name in _OURS or name in _registered:
            raise ValueError(
                f"a backend named {name!r} is already registered. Choose another name."
            )
        _registered[name] = factory


@functools.cache
def get_backend(name: str) -> Backend:
    """Returns the backend of a name; raises `UnknownBackendError` with a suggestion.

    Raises:
        UnknownBackendError: There is none; the message names the nearest.
    """
    if name in _registered:
        return _registered[name]()
    if name not in _OURS:
        living = resolve_legacy_name(name)
        if living is not None:
            return get_backend(living)
        hint = did_you_mean(name, list_backends())
        raise UnknownBackendError(
            f"there is no backend {name!r}.{hint} Backends: {', '.join(list_backends())}."
        )
    backend: Backend = import_attribute(_OURS[name])()
    return backend


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Returns packages that the named backends depend on, with versions, sorted."""
    found = [item for name in names for item in get_backend(name).versions().items()]
    return dict(sorted(found))


def import_attribute(path: str) -> Any:
    """Imports and returns the object at "module:attribute"."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)


log = logging.getLogger("dynamo_backends")


def availability_of(backend: Backend) -> Availability:
    """Returns a backend's availability; unavailable if its check raises."""
    try:
        return backend.availability()
    except Exception as error:
        log.debug("asking %s failed", backend.name, exc_info=True)
        return Availability(
            False, f"its availability check failed ({brief_error(error)})", "report this as a bug"
        )


def require_available(backend: Backend) -> None:
    """Raises `BackendUnavailableError` if the backend cannot run here."""
    available = backend.availability()
    if not available.usable:
        remedy = f" To fix it: {available.remedy}" if available.remedy else ""
        raise BackendUnavailableError(
            f"backend {backend.name!r} cannot run here: {available.reason}.{remedy}"
        )


Owner = Literal["here", "torch", "nobody"]


@dataclass(frozen=True)
class OldName:
    """A legacy backend name with its replacement and the reason.

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
_XLA = "one backend compiles with XLA, traces once and does not need torch_xla"
_CUDAGRAPHS = "it records the kernels that torch launches; TorchScript would launch the same ones"
_TENSORRT = "one backend builds TensorRT engines, whichever way the network gets there"

OLD_NAMES: tuple[OldName, ...] = (
    OldName("ansor", "tvm", "here", "Ansor's successor in TVM is MetaSchedule"),
    OldName("aot_autograd", "", "nobody", "it is not a backend but a helper for backend authors: "
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
    OldName("autotune", "autotune", "here", "it measures backends and uses the fastest"),
    OldName("cudagraphs", "cudagraphs", "torch", "torch still has it"),
    OldName("cudagraphs_ts", "cudagraphs_eager", "here", _CUDAGRAPHS),
    OldName("cudagraphs_ts_ofi", "cudagraphs_eager", "here", _CUDAGRAPHS),
    OldName("fx2trt", "fx2trt", "here", "it uses torch_tensorrt, the successor of fx2trt; "
                                        "'tensorrt' needs only TensorRT"),
    OldName("ipex", "", "nobody", "Intel Extension for PyTorch, which registered it, is "
                                  "discontinued; its last release is for torch 2.8. "
                                  "'inductor_freezing' and 'onednn_graph' also use oneDNN"),
    OldName("ltc_reuse_graph", "ltc", "here", "renamed"),
    OldName("ltc_trivial", "ltc_trace", "here", "renamed"),
    OldName("nnc", "nnc", "here", "as before"),
    OldName("nnc_ofi", "nnc", "here", "NNC compiles what `optimize_for_inference` would rewrite"),
    OldName("nvfuser", "nvfuser", "here", "nvFuser is a separate package now"),
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
    OldName("onnxrt", "onnxrt", "here", "unchanged; torch has a placeholder under this name"),
    OldName("onnxrt_cpu", "onnxrt_cpu", "here", "as before"),
    OldName("onnxrt_cpu_numpy", "onnxrt_cpu", "here", "tensors are shared without numpy"),
    OldName("onnxrt_cuda", "onnxrt_cuda", "here", "as before"),
    OldName("static_runtime", "static_runtime", "here", "as before"),
    OldName("taso", "", "nobody", "TASO is a finished research project that cannot be built with "
                                  "current toolchains; 'inductor' and 'onnxrt' also rewrite "
                                  "graphs"),
    OldName("tensorrt", "tensorrt", "here", "as before"),
    OldName("torch2trt", "tensorrt", "here", _TENSORRT),
    OldName("torchxla_trace_once", "openxla", "here", _XLA),
    OldName("torchxla_trivial", "openxla", "here", _XLA),
    OldName("ts", "ts", "torch", "torch still has it; 'ts_trace' is the same on ATen graphs"),
    OldName("ts_nvfuser", "nvfuser", "here", _NVFUSER),
    OldName("ts_nvfuser_ofi", "nvfuser", "here", _NVFUSER),
    OldName("tvm", "tvm", "here", "torch's own backend of that name calls functions that TVM has "
                                  "removed"),
    OldName("tvm_meta_schedule", "tvm", "here", "merged into one backend; its option "
                                                "`tune_trials` enables tuning"),
)  # fmt: skip


OLD_BY_NAME = {old.name: old for old in OLD_NAMES}


def resolve_legacy_name(name: str) -> str | None:
    """Returns the replacement of a legacy name, logging it; None for other names.

    Raises:
        UnknownBackendError: No backend of this package does; the message says what became of it.
    """
    old = OLD_BY_NAME.get(name)
    if old is None:
        return None
    if old.owner == "here":
        log_legacy_name(old)
        return old.target
    raise UnknownBackendError(legacy_name_message(old))


def legacy_name_message(old: OldName) -> str:
    """Returns a sentence that says what replaced a legacy name."""
    if old.owner == "nobody":
        return f"there is no backend {old.name!r} any more: {old.why}."
    if old.owner == "torch":
        return f"{old.name!r} is replaced by torch's own backend {old.target!r}: {old.why}."
    return f"{old.name!r} is replaced by {old.target!r}: {old.why}."


@functools.cache
def log_legacy_name(old: OldName) -> None:
    """Logs once per process what replaced a legacy name."""
    if old.name != old.target:
        log.warning("%s", legacy_name_message(old))
