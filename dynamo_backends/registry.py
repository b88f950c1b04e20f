"""Names and backends: loaded lazily, with one compiler object per set of options."""

import difflib
import functools
import importlib
import importlib.metadata
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dynamo_backends.backend import Backend, Options
from dynamo_backends.errors import OptionError, UnknownBackendError

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
_lock = threading.Lock()


def list_backends() -> list[str]:
    """Names of this package's backends and of those registered with `register_backend`."""
    return sorted({*_OURS, *_registered})


def third_party_backends() -> list[str]:
    """Names of other packages' backends for `torch.compile`, from their entry points."""
    points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    return sorted(
        p.name for p in points if p.name not in _OURS and not p.value.startswith("dynamo_backends.")
    )


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
    """The backend of that name.

    Raises:
        UnknownBackendError: There is none; the message names the nearest.
    """
    if name in _registered:
        return _registered[name]()
    if name not in _OURS:
        from dynamo_backends.legacy import resolve

        living = resolve(name)
        if living is not None:
            return get_backend(living)
        near = difflib.get_close_matches(name, list_backends(), 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UnknownBackendError(
            f"there is no backend {name!r}.{hint} Backends: {', '.join(list_backends())}."
        )
    module, _, attribute = _OURS[name].partition(":")
    backend: Backend = getattr(importlib.import_module(module), attribute)()
    return backend


class Compiler:
    """A backend with a set of options, as `torch.compile(backend=...)` takes it.

    There is one object per backend and set of options (see `compiler`): Dynamo recompiles when it
    is given another object.
    """

    _tags: tuple[str, ...] = ()

    def __init__(self, name: str, options: Mapping[str, Any]):
        self.name = self.__name__ = name
        self._given = dict(options)

    def __repr__(self) -> str:
        """As a call that makes it."""
        options = "".join(f", {k}={v!r}" for k, v in self._given.items())
        return f"compiler({self.name!r}{options})"

    def options(self, given: Mapping[str, Any] | None = None) -> Options:
        """The validated options, those given to `torch.compile` taking precedence."""
        backend = get_backend(self.name)
        return backend.Options.parse({**self._given, **(given or {})}, self.name)

    def __call__(
        self,
        captured: Any,
        example_inputs: Sequence[Any],
        *,
        options: Mapping[str, Any] | None = None,
        mode: str | None = None,
    ) -> Callable[..., Any]:
        """Compiles what Dynamo captured (see `pipeline.compile_captured`).

        Raises:
            OptionError: An option is wrong, or a `mode` was given: modes are Inductor's.
        """
        from dynamo_backends.pipeline import compile_captured

        if mode not in (None, "default"):
            raise OptionError(
                f"{self.name} has no modes; mode={mode!r} is one of Inductor's. "
                "Use options={...} instead."
            )
        parsed = self.options(options)
        return compile_captured(get_backend(self.name), captured, example_inputs, parsed)


_compilers: dict[tuple[Any, ...], Compiler] = {}


def compiler(name: str, /, **options: Any) -> Compiler:
    """The compiler object of a backend with these options; the same ones give the same object.

    Example:
        >>> torch.compile(model, backend=compiler("openxla", verify="always"))

    Raises:
        UnknownBackendError: There is no such backend.
        OptionError: An option is unknown or wrong.
    """
    if name not in _OURS and name not in _registered:
        get_backend(name)
    if options:
        options = {k: options[k] for k in sorted(options)}
        get_backend(name).Options.parse(options, name)
    key = (name, repr(options))  # values may be dicts
    with _lock:
        if key not in _compilers:
            _compilers[key] = Compiler(name, options)
        return _compilers[key]
