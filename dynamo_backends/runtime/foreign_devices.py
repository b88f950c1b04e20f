"""Hands graphs on other packages' devices to their backend, or raises DeviceError.

| device | who compiles |
|---|---|
| cpu, cuda, meta, and others that the backend's `availability` lists | the backend asked for |
| xla | torch_xla's bridge for Dynamo |
| any other, with a Dynamo backend of its own name (`tpu` of torch_tpu, `npu`) | that one |
| any other | nobody: `DeviceError` |

Nothing is copied to the CPU to be computed there. A device has one runtime in a process: what
another package runs is not opened a second time.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from dynamo_backends import _torch_private as private
from dynamo_backends.interface.backend import Backend
from dynamo_backends.interface.errors import DeviceError, StepDeviceError
from dynamo_backends.runtime.device_tensor import DeviceTensor

OURS = frozenset(("cpu", "cuda", "meta"))

# Where openxla computes with the CPU's tensors; those that live there are torch_xla's, torch_tpu's.
_COMPUTE_ONLY = frozenset(("tpu", "xla"))

_PACKAGES = {"tpu": "torch_tpu", "xla": "torch_xla"}


def foreign_device_type(tensors: Iterable[Any], devices: Sequence[str] = ()) -> str | None:
    """Returns the first device type of tensors that is unsupported; None if there is none."""
    kinds = (t.device.type for t in tensors if isinstance(t, Tensor))
    return next((kind for kind in kinds if kind not in OURS and kind not in devices), None)


def compile_for_foreign_device(
    backend: Backend, captured: fx.GraphModule, example_inputs: Sequence[Any]
) -> Callable[..., Any] | None:
    """Compiles a graph with the backend of its foreign device; None if it has none.

    Args:
        backend: What was asked for.
        captured: Dynamo's graph.
        example_inputs: Its inputs.

    Raises:
        DeviceError: Nobody owns the device.
    """
    kind = foreign_device_type(_tensors_of(captured, example_inputs))
    if kind is None or (kind not in _COMPUTE_ONLY and kind in backend.availability().devices):
        return None
    owner = _owner(kind)
    if owner is None:
        raise foreign_device_error(kind, f"backend={backend.name!r}")
    compiled: Callable[..., Any] = owner(captured, list(example_inputs))
    return compiled


def foreign_device_error(kind: str, entrance: str) -> DeviceError:
    """Returns the `DeviceError` for a device that no backend compiles for.

    Args:
        kind: The type of the device.
        entrance: What was called.
    """
    return DeviceError(
        f"{entrance} was called with tensors on the device {_named(kind)}. This package supports "
        f"the CPU and CUDA, and no Dynamo backend named {kind!r} is registered. Move the model and "
        "its inputs to the CPU (model.cpu()), or use the backend of the package that provides "
        f"{kind!r}."
    )


def refuse_foreign_step(tensors: Iterable[Any], backend: str, home: str | None = None) -> None:
    """Raises StepDeviceError if a training step has tensors on a foreign device.

    Args:
        tensors: All of the step.
        backend: What was asked for; "aot_eager" runs operators where their tensors are.
        home: The device on which it keeps values, if it does.

    Raises:
        StepDeviceError: There is such a tensor, or one that lives elsewhere (`DeviceTensor`).
    """
    tensors = list(tensors)
    elsewhere = {t.home for t in tensors if isinstance(t, DeviceTensor)} - {home}
    if elsewhere and backend != "aot_eager":
        raise StepDeviceError(
            f"compile_step(backend={backend!r}) was called with tensors on "
            f"{', '.join(sorted(elsewhere))}. Use backend='openxla' without the option 'device', "
            "or move the model back with dynamo_backends.xla.to_device(model, 'cpu')."
        )
    kind = foreign_device_type(tensors)
    if kind is not None and backend != "aot_eager":
        raise StepDeviceError(
            f"compile_step(backend={backend!r}) was called with tensors on the device "
            f'{_named(kind)}, which whole steps do not support. Pass fallback="split", which '
            f"compiles forward and backward with the Dynamo backend of {kind!r} if there is one, "
            "or move the model to the CPU."
        )


def refuse_foreign_move(tensors: Iterable[Any], device: str) -> None:
    """Raises `DeviceError` if a tensor to be moved is on a foreign device.

    Args:
        tensors: What is to be moved.
        device: Where to.

    Raises:
        DeviceError: There is such a tensor.
    """
    kind = foreign_device_type(tensors)
    if kind is not None:
        raise DeviceError(
            f"to_device was called with tensors on the device {_named(kind)}, but it supports CPU "
            "tensors only. To compile on their device, use backend='openxla', which passes graphs "
            f"to the owner of the device. To move them to {device!r}, copy them to the CPU first "
            "(model.cpu(), tensor.cpu())."
        )


def refuse_device_in_use(kind: str) -> None:
    """Raises `DeviceError` if another package runs a device in this process.

    Args:
        kind: The type of the device, under which torch knows the package's module (`torch.tpu`).

    Raises:
        DeviceError: It does.
    """
    if kind not in _COMPUTE_ONLY:
        return  # torch itself shares it
    is_initialized = getattr(getattr(torch, kind, None), "is_initialized", None)
    if is_initialized is None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch_tpu's, that this may change
        is_taken = is_initialized()
    if is_taken:
        package = _PACKAGES.get(kind, f"torch.{kind}")
        raise DeviceError(
            f"{package} uses the device {kind!r} in this process, and a device supports one "
            f"runtime at a time. Move the model with model.to({kind!r}) and use backend='openxla', "
            f"which passes graphs to {package}. Or start the process with "
            f"TORCH_DEVICE_BACKEND_AUTOLOAD=0, so that torch does not load {package}, and import "
            "dynamo_backends."
        )


def _named(kind: str) -> str:
    """Returns a device, with the package that provides it if that is known."""
    package = _PACKAGES.get(kind)
    return repr(kind) if package is None else f"{kind!r} of {package}"


def _tensors_of(captured: fx.GraphModule, example_inputs: Sequence[Any]) -> Iterator[Any]:
    yield from example_inputs
    for node in captured.graph.nodes:
        yield from pytree.tree_leaves(node.meta.get("example_value"))


def _owner(kind: str) -> Callable[..., Any] | None:
    if kind == "xla":
        return private.aot_autograd(fw_compiler=_bridged)
    if kind not in torch._dynamo.list_backends(exclude_tags=()):
        return None
    found: Callable[..., Any] = private.lookup_backend(kind)
    return found


def _bridged(graph: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    """As torch's own `openxla`: torch_xla compiles at the first call, with its real tensors."""
    from functorch.compile import make_boxed_func  # type: ignore[import-untyped]

    compiled: Callable[..., Any] | None = None

    def run(*args: Any) -> Any:
        nonlocal compiled
        if compiled is None:
            compiled = _bridge().extract_compiled_graph(graph, args)
        return compiled(*args)

    run_boxed: Callable[..., Any] = make_boxed_func(run)
    return run_boxed


def _bridge() -> Any:
    try:
        from torch_xla._dynamo import dynamo_bridge
    except ImportError as error:
        raise DeviceError(
            "tensors on the device 'xla' are compiled by torch_xla, which cannot be imported "
            f"({error}). Install the torch_xla version for torch {torch.__version__}, or move the "
            "model and its inputs to the CPU (model.cpu())."
        ) from error
    return dynamo_bridge
