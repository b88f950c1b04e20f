"""A device of torch's slot for devices from outside (PrivateUse1), which computes on the CPU.

The slot is one per process and never given back, so what starts it runs in a process of its own.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils import backend_registration


class DeviceModule(backend_registration._DummyBackendModule):
    """What torch knows as `torch.<name>`: a device that is in use once it has a tensor."""

    in_use = False

    def is_initialized(self) -> bool:
        return self.in_use


class PythonTensor(Tensor):
    """A tensor of the device.

    Args:
        raw: Its contents, on the CPU.
    """

    device_name: ClassVar[str]
    raw: Tensor

    @staticmethod
    def __new__(cls: Any, raw: Tensor) -> Any:
        device = f"{cls.device_name}:0"
        made = Tensor._make_wrapper_subclass(cls, raw.shape, dtype=raw.dtype, device=device)
        made.raw = raw
        getattr(torch, cls.device_name).in_use = True
        return made

    def __tensor_flatten__(self) -> Any:
        return ["raw"], type(self)

    @staticmethod
    def __tensor_unflatten__(inner: Any, kind: Any, size: Any, stride: Any) -> Any:
        return kind(inner["raw"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def raw(x: Any) -> Any:
            return x.raw if isinstance(x, PythonTensor) else x

        args, kwargs = pytree.tree_map(raw, (args, kwargs or {}))
        return pytree.tree_map_only(Tensor, cls, func(*args, **kwargs))


def start(name: str) -> type[PythonTensor]:
    """Takes the slot; returns the class of the device's tensors."""
    backend_registration._setup_privateuseone_for_python_backend(name, DeviceModule())
    return type(name.title(), (PythonTensor,), {"device_name": name})


def raised(call: Callable[[], Any]) -> str:
    """The class and the text of the error that a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("nothing was raised")
