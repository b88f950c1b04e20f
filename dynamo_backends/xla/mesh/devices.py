"""The devices of a mesh, and arrays that are split over them."""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec
from torch import Tensor

from dynamo_backends.interface.errors import DeviceError
from dynamo_backends.interface.forks import check_process
from dynamo_backends.interface.mesh import Mesh, Placement
from dynamo_backends.runtime.device_values import register_home
from dynamo_backends.xla import _jaxlib
from dynamo_backends.xla.arrays import to_numpy
from dynamo_backends.xla.runtime import Device


@dataclass(frozen=True)
class MeshDevice(Device):
    """All devices of a mesh as one, on which values stay.

    Attributes:
        mesh: Names and sizes of its dimensions.
        grid: The same with XLA's devices.
        lock: Held while a program is launched: there are threads for one launch (see `_threads`).
    """

    mesh: Mesh = field(default_factory=lambda: Mesh((), (), ()))
    grid: Any = field(default=None, compare=False)
    lock: Any = field(default_factory=threading.Lock, compare=False, repr=False)

    @property
    def is_remote(self) -> bool:
        """See `Device.is_remote`: no tensor of torch's is in several places."""
        return True

    @property
    def name(self) -> str:
        """Such as "cpu mesh (data=4, model=2)"."""
        devices = self.mesh.devices
        which = "" if devices == tuple(range(len(devices))) else f" of devices {devices}"
        return f"{self.platform} mesh ({self.mesh}){which}"

    @property
    def handles(self) -> list[Any]:
        """The devices in the order of the mesh."""
        return list(self.grid.devices.flat)

    def sharding(
        self, placement: Placement, order: Sequence[int], expanded: Sequence[int] = ()
    ) -> NamedSharding:
        """How an array is split.

        Args:
            placement: Of the tensor.
            order: The tensor's dimensions as the array has them.
            expanded: Those of which the array has one element, which cannot be split.
        """
        over: dict[int, tuple[str, ...]] = {}
        for name, dim in zip(self.mesh.names, placement, strict=True):
            if dim is not None and dim not in expanded:
                over[dim] = (*over.get(dim, ()), name)
        return NamedSharding(self.grid, PartitionSpec(*(over.get(d) for d in order)))

    def split(self, tensor: Tensor, sharding: NamedSharding) -> Any:
        """A copy of a row-major tensor as an array on the mesh."""
        return _jaxlib.split(to_numpy(tensor), sharding)

    def upload(self, tensor: Tensor) -> Any:
        """See `Home.upload`: all of it on each device."""
        return self.split(tensor, self.sharding(self.mesh.replicated, range(tensor.dim())))

    def execute(self, call: Callable[[list[Any]], Any], arrays: list[Any]) -> list[Any]:
        """See `Device.execute`."""
        with self.lock:
            return super().execute(call, arrays)


def open_mesh(platform: str, mesh: Mesh) -> MeshDevice:
    """The devices of a mesh. A CPU is divided into as many as the mesh has.

    Args:
        platform: "cpu" or "tpu".
        mesh: Their grid.

    Raises:
        DeviceError: There are fewer.
        ForkedProcessError: The client was started before this process was forked off.
    """
    with _lock:
        device = _open(platform, replace(mesh, kind=""))
    register_home(device)
    check_process(device.pid, "XLA")
    return device


_lock = threading.Lock()


@functools.cache
def _open(platform: str, mesh: Mesh) -> MeshDevice:
    devices = _divided_cpu(max(mesh.devices) + 1) if platform == "cpu" else _found(platform)
    if max(mesh.devices) >= len(devices):
        raise DeviceError(
            f"the mesh ({mesh}) has {mesh.size} devices, the last of them number "
            f"{max(mesh.devices)}, but XLA sees {len(devices)} {platform} devices here. Make it "
            "smaller, or run it where there are more."
        )
    handles = [devices[i] for i in mesh.devices]
    grid = jax.sharding.Mesh(np.array(handles).reshape(mesh.sizes), mesh.names)
    first = handles[0]
    return MeshDevice(platform, first.client, first, os.getpid(), mesh=mesh, grid=grid)


def _found(platform: str) -> list[Any]:
    try:
        return list(jax.local_devices(backend=platform))
    except RuntimeError as error:
        raise DeviceError(f"XLA has no {platform} device here ({error})") from error


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
