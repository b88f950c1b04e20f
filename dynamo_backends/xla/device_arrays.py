"""Values that stay on a device of XLA's between compiled graphs.

A value is one array in the order of its storage's memory. A program that reads all of it gets the
array itself; one that reads a view of it, as of a transposed or sliced tensor, gets what a small
program makes of it on the device.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from dynamo_backends.graph.layouts import InputConverter, OutputConverter
from dynamo_backends.runtime.device_tensor import DeviceTensor
from dynamo_backends.runtime.device_values import (
    RemoteDevice,
    fetch_to_host,
    fills_storage,
    make_device_handle,
    storage_value,
)
from dynamo_backends.xla import _jaxlib
from dynamo_backends.xla.dtypes import to_jax


class ArrayHome(RemoteDevice, Protocol):
    """The interface of a device on which arrays stay."""

    @property
    def platform(self) -> str:
        """Returns what programs are lowered for."""

    @property
    def client(self) -> Any:
        """Returns the device's PJRT client."""

    @property
    def handle(self) -> Any:
        """The device in the client."""

    def __hash__(self) -> int:
        """Programs are kept by device."""

    def execute(self, call: Callable[[list[Any]], Any], arrays: list[Any]) -> list[Any]:
        """Launches a program on the device."""


def to_device_arrays(
    home: ArrayHome, importers: Sequence[InputConverter], tensors: Sequence[Tensor]
) -> list[Any]:
    """Returns device arrays for a program's inputs, uploading those that are elsewhere.

    Args:
        home: The device.
        importers: One per input.
        tensors: One per input, from anywhere.
    """
    return [_take_in(home, *pair) for pair in zip(importers, tensors, strict=True)]


def _take_in(home: ArrayHome, importer: InputConverter, tensor: Tensor) -> Any:
    if not isinstance(tensor, DeviceTensor):
        return home.upload(importer(tensor))
    handle = tensor._handle
    value = storage_value(handle)
    if value is None or value.home is not home:
        return home.upload(importer(tensor.host()))
    seen = importer.to_program_order(handle)
    if fills_storage(handle) and seen.is_contiguous():
        array = value.ensure_on_device(handle, importer.dense_shape)
        if array.shape != importer.dense_shape:
            array = reshape_on_device(home, array, handle.dtype, importer.dense_shape)
            value.array = array if value.array is not None else None
        return array
    is_plain = not (seen.is_conj() or seen.is_neg())
    if value.is_exposed or value.dtype is not handle.dtype or not is_plain:
        return home.upload(importer(fetch_to_host(handle)))
    base = value.ensure_on_device(
        handle, (handle.untyped_storage().nbytes() // handle.element_size(),)
    )
    geometry = tuple(seen.shape), seen.stride(), seen.storage_offset()
    run = _program(home, _strided, tuple(base.shape), value.dtype, geometry)
    return home.execute(run, [base])[0]


def wrap_device_outputs(
    home: RemoteDevice,
    exporters: Sequence[OutputConverter],
    arrays: Sequence[Any],
    dtypes: Sequence[torch.dtype],
    origin: str = "",
) -> list[Tensor]:
    """Wraps device arrays as tensors with the strides that torch promises.

    Args:
        home: The device.
        exporters: One per result.
        arrays: One per result, perhaps still being computed.
        dtypes: One per result.
        origin: What computed them, for errors.
    """
    results: list[Tensor] = []
    for export, array, dtype in zip(exporters, arrays, dtypes, strict=True):
        handle = make_device_handle(home, array, export.dense_shape, dtype, origin)
        if export.copies:
            fetch_to_host(handle)
        results.append(DeviceTensor(export(handle), home.name))
    return results


def write_to_device_tensor(
    home: ArrayHome, target: Tensor, export: OutputConverter, array: Any, origin: str
) -> None:
    """Writes a result array into a tensor that lives on the device.

    Args:
        home: The device.
        target: A handle.
        export: The exporter to the target's strides.
        array: The result.
        origin: What computed it, for errors.
    """
    value = storage_value(target)
    assert value is not None
    handle = make_device_handle(home, array, export.dense_shape, target.dtype)
    result = export(handle) if not export.copies else handle
    if fills_storage(target) and result.stride() == target.stride():
        value.set_device_array(target, array, origin)
        return
    size = target.untyped_storage().nbytes() // target.element_size()
    base = value.ensure_on_device(target, (size,))
    geometry = tuple(target.shape), target.stride(), target.storage_offset()
    shapes = tuple(base.shape), tuple(export.dense_shape), tuple(export.storage.inverse_order)
    run = _scatter(home, shapes, target.dtype, geometry)
    value.set_device_array(target, home.execute(run, [base, array])[0], origin)


def reshape_on_device(home: ArrayHome, array: Any, dtype: torch.dtype, shape: Sequence[int]) -> Any:
    """Reshapes an array on its device."""
    run = _program(home, _reshape, tuple(array.shape), dtype, tuple(shape))
    return home.execute(run, [array])[0]


def copy_on_device(home: ArrayHome, array: Any, dtype: torch.dtype) -> Any:
    """Copies an array on its device, so that the copy can be donated."""
    run = _program(home, _copy, tuple(array.shape), dtype, ())
    return home.execute(run, [array])[0]


def _reshape(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return array.reshape(shape)


def _copy(array: jax.Array, _: tuple[()]) -> jax.Array:
    return jnp.copy(array)


def _strided(array: jax.Array, geometry: tuple[tuple[int, ...], tuple[int, ...], int]) -> jax.Array:
    return array.reshape(-1).at[_places(array.size, *geometry)].get(mode="promise_in_bounds")


def _places(size: int, shape: Sequence[int], strides: Sequence[int], offset: int) -> jax.Array:
    """Returns where the elements of a view are in a storage."""
    wide = size > np.iinfo(np.int32).max
    places = jnp.full(shape, offset, jnp.int64 if wide else jnp.int32)
    for dim, stride in enumerate(strides):
        places += stride * jax.lax.broadcasted_iota(places.dtype, shape, dim)
    return places


@functools.lru_cache(maxsize=1024)
def _scatter(
    home: ArrayHome, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, geometry: Any
) -> Callable[[list[Any]], list[Any]]:
    """Returns a program that writes a view's elements into a storage.

    Args:
        home: The device.
        shapes: Of the storage and of the elements, and the order that puts these in the view's.
        dtype: Dtype of the elements.
        geometry: Geometry of the view.
    """
    storage, elements, order = shapes

    def program(base: jax.Array, array: jax.Array) -> jax.Array:
        places = _places(base.size, *geometry)
        written = jnp.broadcast_to(jnp.transpose(array, order), places.shape)
        flat = base.reshape(-1).at[places].set(written, mode="promise_in_bounds")
        return flat.reshape(storage)

    return _compiled(home, program, [storage, elements], dtype)


@functools.lru_cache(maxsize=1024)
def _program(
    home: ArrayHome,
    function: Callable[..., jax.Array],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    how: Any,
) -> Callable[[list[Any]], list[Any]]:
    """Returns a program of one input and one output; one for each kind of call."""
    return _compiled(home, lambda array: function(array, how), [shape], dtype)


def _compiled(
    home: ArrayHome,
    function: Callable[..., jax.Array],
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
) -> Callable[[list[Any]], list[Any]]:
    with jax.enable_x64(True):
        given = [jax.ShapeDtypeStruct(shape, to_jax(dtype)) for shape in shapes]
        traced = jax.jit(function).trace(*given)
        module = _jaxlib.bytecode(traced.lower(lowering_platforms=(home.platform,)))
        executable = _jaxlib.compile_program(home.client, home.handle, module)
    return _jaxlib.make_single_device_call(executable, home.handle)
