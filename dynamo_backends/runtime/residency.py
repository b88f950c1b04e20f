"""Keeps values on a device between compiled graphs and AOT Autograd.

AOT Autograd hands over the handles of `DeviceTensor`s, and wraps handles that it gets back. In the
pipeline values are `DeviceTensor`s, so that whatever runs in eager there finds their contents.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends.runtime.device_tensor import DeviceTensor, as_device_tensor, handle_of
from dynamo_backends.runtime.device_values import fetch_to_host, storage_value

Boxed = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True)
class DeviceResidency:
    """Decides on which device the results of a captured graph remain.

    Attributes:
        home: Where results of its graphs stay; None: they are torch's.
    """

    home: str | None

    def wrap_compiled(self, run: Boxed, graph: fx.Graph) -> Boxed:
        """Wraps a compiled graph so that results remain on the device until read.

        Args:
            run: From the pipeline.
            graph: AOT Autograd's.
        """
        if self.home is None:
            return lambda args: run(_taken(args, _on_host))
        ends = private.classify_aot_outputs(graph)
        is_read = [end == "read" for end in ends]

        def call(args: list[Any]) -> Sequence[Any]:
            hooks = private.saved_tensors_hooks() is not None  # which read what is saved
            if hooks:
                list(map(_on_host, args))
            results = run(_taken(args, as_device_tensor))
            handles = [handle_of(x) for x in results]
            for handle, reads in zip(handles, is_read, strict=True):
                if reads or hooks:  # AOT Autograd itself, or whoever it returns the tensor to
                    _on_host(handle)
            return handles

        return call

    def wrap_results(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps AOT Autograd's function so that it returns `DeviceTensor`s."""
        if self.home is None:
            return compiled
        home = self.home

        def call(*args: Any) -> Any:
            results = compiled(*args)
            if not isinstance(results, list | tuple):
                return _wrapped(results, home)
            return type(results)(_wrapped(x, home) for x in results)

        return call


def device_of_values(values: Sequence[Any]) -> str | None:
    """Returns the device name of the first `DeviceTensor`; None if there is none."""
    return next((x.home for x in values if isinstance(x, DeviceTensor)), None)


def _taken(args: list[Any], convert: Callable[[Any], Any]) -> list[Any]:
    """Returns the arguments of a boxed call, which are cleared."""
    values = list(map(convert, args))
    args.clear()
    return values


def _on_host(value: Any) -> Any:
    value = handle_of(value)
    return fetch_to_host(value) if type(value) is Tensor else value


def _wrapped(value: Any, home: str) -> Any:
    if type(value) is not Tensor or storage_value(value) is None:
        return value
    if value.requires_grad:
        return _Wrap.apply(value, home)
    return DeviceTensor(value, home)


class _Wrap(torch.autograd.Function):
    """A handle as a `DeviceTensor`; the gradient of one is the handle of the other's."""

    @staticmethod
    def forward(ctx: Any, handle: Tensor, home: str) -> Tensor:
        ctx.strides = handle.stride()
        return DeviceTensor(handle.detach(), home)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        handle = handle_of(gradient)
        if handle.stride() != ctx.strides:  # AOT Autograd copies it
            fetch_to_host(handle)
        return handle, None
