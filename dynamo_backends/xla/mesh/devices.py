"""The devices of a mesh, and arrays that are split over them."""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import dynamo_backends.xla.jax_import  # noqa: F401 - before jax

# isort: split
import jax
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec
from torch import Tensor

from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.interface.errors import DeviceError, OptionError
from dynamo_backends.interface.forks import check_not_forked
from dynamo_backends.interface.mesh import Mesh, Placement
from dynamo_backends.runtime.device_values import register_device
from dynamo_backends.runtime.foreign_devices import refuse_device_in_use
from dynamo_backends.runtime.ranks import RankGroup, default_rank_group
from dynamo_backends.xla import _jaxlib
from dynamo_backends.xla.arrays import InFlight, tensor_from_numpy, tensor_to_numpy
from dynamo_backends.xla.mesh.gloo_connections import connect_ranks, finish_gloo_connections
from dynamo_backends.xla.runtime import PjrtDevice


@dataclass(frozen=True)
class MeshDevice(PjrtDevice):
    """All devices of a mesh as one device, on which values stay.

    Attributes:
        mesh: Names and sizes of its dimensions.
        grid: The same with XLA's devices.
        lock: Held while a program is launched: there are threads for one launch (see `_threads`).
        ranks: The processes that have a device each; None: all are of this process.
    """

    mesh: Mesh = field(default_factory=lambda: Mesh((), (), ()))
    grid: Any = field(default=None, compare=False)
    lock: Any = field(default_factory=threading.Lock, compare=False, repr=False)
    ranks: RankGroup | None = field(default=None, compare=False, repr=False)

    @property
    def is_remote(self) -> bool:
        """See `Device.is_remote`: no tensor of torch's is in several places."""
        return True

    @property
    def name(self) -> str:
        """Such as "cpu mesh (data=4, model=2)"."""
        devices = self.mesh.devices
        which = "" if devices == tuple(range(len(devices))) else f" of devices {devices}"
        ranks = "" if self.ranks is None else f" of {self.ranks.size} processes"
        return f"{self.platform} mesh ({self.mesh}){which}{ranks}"

    @property
    def handles(self) -> list[Any]:
        """The devices in the order of the mesh."""
        return list(self.grid.devices.flat)

    def sharding(
        self, placement: Placement, order: Sequence[int], expanded: Sequence[int] = ()
    ) -> NamedSharding:
        """Returns how an array is split.

        Args:
            placement: Placement of the tensor.
            order: The tensor's dimensions as the array has them.
            expanded: Those of which the array has one element, which cannot be split.
        """
        over: dict[int, tuple[str, ...]] = {}
        for name, dim in zip(self.mesh.names, placement, strict=True):
            if dim is not None and dim not in expanded:
                over[dim] = (*over.get(dim, ()), name)
        return NamedSharding(self.grid, PartitionSpec(*(over.get(d) for d in order)))

    def split(self, tensor: Tensor, sharding: NamedSharding) -> Any:
        """Returns a copy of a row-major tensor as an array on the mesh."""
        return _jaxlib.shard_array(tensor_to_numpy(tensor), sharding)

    def join(self, tensor: Tensor, shape: Sequence[int], sharding: NamedSharding) -> Any:
        """Returns an array of which each process gives its part, a tensor."""
        return _jaxlib.make_array_from_shard(tensor_to_numpy(tensor.contiguous()), shape, sharding)

    def duplicated(self, array: Any, sharding: NamedSharding) -> Any:
        """A copy of an array, which may be given away; of several processes split as it is."""
        if self.ranks is None:
            return _jaxlib.shard_array(np.asarray(array), sharding)
        part = self.ranks.run_and_wait(lambda: np.asarray(array.addressable_data(0)))
        return _jaxlib.make_array_from_shard(part, array.shape, array.sharding)

    def upload(self, tensor: Tensor) -> Any:
        """See `Home.upload`: all of it on each device."""
        return self.split(tensor, self.sharding(self.mesh.replicated, range(tensor.dim())))

    def execute(self, call: Callable[[list[Any]], Any], arrays: list[Any]) -> list[Any]:
        """See `Device.execute`."""
        with self.lock:
            return super().execute(call, arrays)

    def download(self, array: Any, flat: Tensor) -> None:
        """See `Home.download`; what is split over processes they read together.

        Raises:
            RankError: Another process has ended, is suspended, or does something else.
        """
        if self.ranks is None:
            super().download(array, flat)
            return
        part = self.ranks.run_and_wait(lambda: np.asarray(array.addressable_data(0)))
        if array.sharding.is_fully_replicated:
            np.copyto(tensor_to_numpy(flat), part.reshape(-1))
            return
        whole = tensor_to_numpy(flat).reshape(array.shape)
        what = f"reads a tensor {array.dtype}{list(array.shape)} that is split"
        places = array.sharding.devices_indices_map(array.shape)
        parts = self.ranks.all_gather(what, tensor_from_numpy(np.array(part)), patience=_PATIENCE)
        for handle, each in zip(self._by_rank(), parts, strict=True):
            whole[places[handle]] = tensor_to_numpy(each)

    def local_shard(self, array: Any) -> tuple[tuple[int, ...], Tensor] | None:
        """See `RemoteDevice.local_shard`."""
        if self.ranks is None or array.sharding.is_fully_replicated:
            return None
        place = array.sharding.devices_indices_map(array.shape)[self.handle]
        part = self.ranks.run_and_wait(lambda: np.array(array.addressable_data(0)))
        return tuple(each.start or 0 for each in place), tensor_from_numpy(part)

    def _by_rank(self) -> list[Any]:
        return sorted(self.handles, key=lambda device: device.process_index)


def open_mesh(platform: str, mesh: Mesh) -> MeshDevice:
    """Returns the devices of a mesh. A CPU is divided into as many as the mesh has.

    Args:
        platform: "cpu" or "tpu".
        mesh: Their grid.

    Raises:
        DeviceError: There are fewer, or another package runs them.
        ForkedProcessError: The client was started before this process was forked off.
        OptionError: Its devices are of several processes, and no CPUs.
        RankError: One of these has ended.
    """
    with _lock:
        if mesh.of_ranks:
            device = _across(platform, replace(mesh, kind=""), default_rank_group())
        else:
            device = _open(platform, replace(mesh, kind=""))
    register_device(device)
    check_not_forked(device.pid, "XLA")
    return device


_FEW = 2
"""Largest number of launched programs of several processes: one more would wait in XLA."""

_PATIENCE = 300.0
"""Seconds that who reads a tensor waits for other processes to read it, too."""

_lock = fork_safe_lock()


@functools.cache
def _open(platform: str, mesh: Mesh) -> MeshDevice:
    devices = _divided_cpu(max(mesh.devices) + 1) if platform == "cpu" else _found(platform)
    if max(mesh.devices) >= len(devices):
        raise DeviceError(
            f"the mesh ({mesh}) needs {mesh.size} devices, up to number {max(mesh.devices)}, but "
            f"XLA finds {len(devices)} {platform} devices here. Use a smaller mesh, or a machine "
            "with more devices."
        )
    handles = [devices[i] for i in mesh.devices]
    grid = jax.sharding.Mesh(np.array(handles).reshape(mesh.sizes), mesh.names)
    first = handles[0]
    return MeshDevice(platform, first.client, first, os.getpid(), mesh=mesh, grid=grid)


@functools.cache
def _across(platform: str, mesh: Mesh, ranks: RankGroup) -> MeshDevice:
    if platform != "cpu":
        raise OptionError(
            f"a mesh over {ranks.size} processes is supported on CPUs only, not on {platform}"
        )
    with _threads(1):
        devices = connect_ranks(ranks)
    handles = [devices[i] for i in mesh.devices]
    grid = jax.sharding.Mesh(np.array(handles).reshape(mesh.sizes), mesh.names)
    finish_gloo_connections(ranks, grid)
    here = devices[ranks.rank]
    few = InFlight(_FEW, lambda array: ranks.run_and_wait(array.block_until_ready))
    ranks.register_exit_wait(few.drain)
    place = platform, here.client, here, os.getpid()
    return MeshDevice(*place, in_flight=few, mesh=mesh, grid=grid, ranks=ranks)


def _found(platform: str) -> list[Any]:
    refuse_device_in_use(platform)
    try:
        return list(jax.local_devices(backend=platform))
    except RuntimeError as error:
        raise DeviceError(f"XLA finds no {platform} device here ({error})") from error


@functools.cache
def _divided_cpu(count: int) -> list[Any]:
    with _threads(2 * count + 2):
        client = _jaxlib.make_cpu_client(asynchronous=True, devices=count)
    return list(client.local_devices())


@contextlib.contextmanager
def _threads(least: int) -> Iterator[None]:
    """While a client is being started: how many threads it will have, torch's number at least.

    A program on n devices holds n threads, each of which may wait in a collective for the others,
    and the next program that is launched holds n more, which wait for its inputs. With fewer than
    2n threads a thread that others wait for may never run.
    """
    name = "PJRT_NPROC"
    before = os.environ.get(name)
    asked = int(before) if before is not None and before.isdecimal() else torch.get_num_threads()
    os.environ[name] = str(max(asked, least))
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
