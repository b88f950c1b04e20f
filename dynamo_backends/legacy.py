"""The backend names that were in use before, and what became of each.

TorchDynamo began with some forty backends; torch kept a few of the names, and lists elsewhere (such
as `DynamoBackend` of Hugging Face's accelerate) still offer others. `torch.compile(backend=name)`
knows all of them: a name resolves to the backend that does its work today and one log line says so,
or an error says what became of it.

`python -m dynamo_backends.legacy` prints docs/names.md.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dynamo_backends.errors import UnknownBackendError

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
_BY_NAME = {old.name: old for old in OLD_NAMES}


def is_present(old: OldName) -> bool:
    """Whether the backend that stands for a name exists in this version."""
    from dynamo_backends.registry import list_backends

    return old.owner == "torch" or (old.owner == "here" and old.target in list_backends())


def resolve(name: str) -> str | None:
    """The backend of this package that stands for an old name; None if the name is not an old one.

    Raises:
        UnknownBackendError: No backend of this package does; the message says what became of it.
    """
    old = _BY_NAME.get(name)
    if old is None:
        return None
    if old.owner == "here" and is_present(old):
        _announce(old)
        return old.target
    raise UnknownBackendError(explain(old))


def explain(old: OldName) -> str:
    """What became of a name, as a message for somebody who has asked for it."""
    if old.owner == "nobody":
        return f"there is no backend {old.name!r} any more: {old.why}."
    if old.owner == "torch":
        return f"{old.name!r} is torch's own backend {old.target!r} today: {old.why}."
    if not is_present(old):
        stands = "" if old.target == old.name else f" It would be {old.target!r} today: {old.why}."
        instead = "'inductor' compiles for the same devices."
        return f"this version does not have the backend {old.target!r} yet.{stands} {instead}"
    return f"{old.name!r} is {old.target!r} today: {old.why}."


@functools.cache
def _announce(old: OldName) -> None:
    if old.name != old.target:
        log.warning("%s", explain(old))


class OldCompiler:
    """Stands for an old name in `torch.compile(backend=name)`; the living backend does the work."""

    _tags: tuple[str, ...] = ()

    def __init__(self, old: OldName):
        self.__name__ = old.name
        self._old = old

    def __call__(
        self, captured: Any, example_inputs: Sequence[Any], **settings: Any
    ) -> Callable[..., Any]:
        """Compiles what Dynamo captured.

        Raises:
            UnknownBackendError: No backend stands for the name; the message says why.
        """
        if self._old.owner != "torch":
            from dynamo_backends.registry import compiler

            return compiler(str(resolve(self._old.name)))(captured, example_inputs, **settings)
        from dynamo_backends._torch_private import lookup_backend

        _announce(self._old)
        return lookup_backend(self._old.target)(captured, example_inputs, **settings)


@functools.cache
def old_compiler(name: str) -> OldCompiler:
    """The one object that stands for an old name."""
    return OldCompiler(_BY_NAME[name])


def __getattr__(name: str) -> OldCompiler:
    """Entry points name `dynamo_backends.legacy:<old name>`."""
    if name in _BY_NAME:
        return old_compiler(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def entry_points() -> list[str]:
    """The names for which this module has an entry point: those that no living backend bears."""
    return [old.name for old in OLD_NAMES if old.name != old.target]


def document() -> str:
    """docs/names.md."""
    rows = [
        f"| `{old.name}` | {f'`{old.target}`' if old.target else 'none'} | {_whose(old)} "
        f"| {old.why} |"
        for old in OLD_NAMES
    ]
    return _HEAD + "\n".join(rows) + "\n"


def _whose(old: OldName) -> str:
    if old.owner == "here":
        return "this package" if is_present(old) else "this package, not in this version yet"
    return {"torch": "torch", "nobody": ""}[old.owner]


_HEAD = """# Old names

TorchDynamo began with some forty backends, and lists elsewhere still offer their names (such as
`DynamoBackend` of Hugging Face's accelerate). Each name below works in
`torch.compile(backend=...)`: it resolves to the backend that does its work today, which one log
line says, or it raises an error that says what became of it. Names that torch itself registers are
left to torch.

Made by `python -m dynamo_backends.legacy`.

| name | today | whose | what became of it |
|---|---|---|---|
"""

if __name__ == "__main__":
    print(document(), end="")
