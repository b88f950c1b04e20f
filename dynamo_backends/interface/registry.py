"""Names and backends, which are loaded when somebody asks for them."""

import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Iterable
from typing import Any

from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.interface.backend import Backend
from dynamo_backends.interface.errors import UnknownBackendError, did_you_mean
from dynamo_backends.interface.legacy_names import resolve

ENTRY_POINT_GROUP = "torch_dynamo_backends"

_OURS: dict[str, str] = {
    "autotune": "dynamo_backends.autotune.backend:Autotune",
    "cudagraphs_eager": "dynamo_backends.cudagraphs.backend:CudaGraphsEager",
    "fx2trt": "dynamo_backends.trt.converters:Fx2TRT",
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
    """Names of this package's backends and of those registered with `register_backend`."""
    return sorted({*_OURS, *_registered})


def is_backend(name: str) -> bool:
    """Returns whether that is the name of a backend of this package, or of a registered one."""
    return name in _OURS or name in _registered


def is_found_elsewhere(backend: Backend) -> bool:
    """Whether other processes find this very backend by its name: it is one of this package's."""
    return backend.name in _OURS and get_backend(backend.name) is backend


def third_party_backends() -> list[str]:
    """Names of other packages' backends for `torch.compile`, from their entry points."""
    points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    return sorted(
        p.name for p in points if p.name not in _OURS and not p.value.startswith("dynamo_backends.")
    )


def third_party_version(name: str) -> tuple[str, str] | None:
    """The package that brings another's backend, and its version; None for other backends."""
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=name):
        if name in third_party_backends() and point.dist is not None:
            return point.dist.name, point.dist.version
    return None


def register_backend(name: str, factory: Callable[[], Backend]) -> None:
    """Makes a backend known under a name, for `get_backend` and `compiler`.

    Args:
        name: What users will write. Packages that want `torch.compile(backend=name)` to work
            without an import add an entry point too (see docs/backends.md).
        factory: Makes the backend; called once, on first use.

    Raises:
        ValueError: The name is taken.
    """
    with _lock:
        if name in _OURS or name in _registered:
            raise ValueError(f"a backend called {name!r} is registered already")
        _registered[name] = factory


@functools.cache
def get_backend(name: str) -> Backend:
    """Returns the backend of that name.

    Raises:
        UnknownBackendError: There is none; the message names the nearest.
    """
    if name in _registered:
        return _registered[name]()
    if name not in _OURS:
        living = resolve(name)
        if living is not None:
            return get_backend(living)
        hint = did_you_mean(name, list_backends())
        raise UnknownBackendError(
            f"there is no backend {name!r}.{hint} Backends: {', '.join(list_backends())}."
        )
    backend: Backend = load(_OURS[name])()
    return backend


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Returns the installed packages behind these backends, sorted, with their versions."""
    found = [item for name in names for item in get_backend(name).versions().items()]
    return dict(sorted(found))


def load(path: str) -> Any:
    """Returns the object at "module:attribute", whose module is imported if it is not yet."""
    module, _, attribute = path.partition(":")
    return getattr(importlib.import_module(module), attribute)
