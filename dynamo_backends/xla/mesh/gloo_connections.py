"""A mesh of processes: each has one device, and they talk through gloo.

jaxlib's coordination service is a store of keys by which gloo's connections are made. As long as a
process is connected to it the service's end ends the process, without an exception. So all
connections are made at once, and the service is left; who lives is found out by `runtime.ranks`.
"""

import functools
import itertools
import math
import socket
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dynamo_backends.interface.errors import DeviceError, error_text
from dynamo_backends.runtime.ranks import RankGroup
from dynamo_backends.xla import _jaxlib

_SECONDS = 120  # in which the processes have to find each other
_ATTEMPTS = 5  # to find a free port


def connect_ranks(ranks: RankGroup) -> list[Any]:
    """Connects all ranks to one PJRT client and returns its devices, in rank order.

    Raises:
        RankError: One of them has ended.
        DeviceError: They cannot be connected.
    """
    service = None
    host = own_address(ranks.host)
    key = f"coordinator/{len(_connections)}"
    if ranks.rank == 0:
        service, address = _serve(host, ranks.size)
        ranks.store.set(key, address)
    address = ranks.run_on_all_ranks(
        "looks up the coordinator", lambda: ranks.store.get(key)
    ).decode()

    def meet() -> tuple[Any, Any]:
        return _jaxlib.make_distributed_cpu_client(address, ranks.rank, ranks.size, host, _SECONDS)

    client, connection = ranks.run_on_all_ranks("connects", meet)
    for each in (client, connection, service):
        ranks.on_failure.append(functools.partial(_jaxlib.leak_object, each))
    _connections[id(client)] = connection, service
    return sorted(client.devices(), key=lambda device: device.process_index)


def finish_gloo_connections(ranks: RankGroup, grid: jax.sharding.Mesh) -> None:
    """Connects gloo groups for all mesh axes, then leaves the coordination service."""
    connection, _ = _connections[id(grid.devices.flat[0].client)]
    for axes in _groups(grid):
        ranks.run_on_all_ranks(f"connects over {' and '.join(axes)}", _meeting(grid, axes))
    ranks.all_gather_object("is connected", None)
    ranks.run_and_wait(connection.shutdown)


_connections: dict[int, tuple[Any, Any]] = {}  # by client, as long as the process lives


def _groups(grid: jax.sharding.Mesh) -> Iterator[tuple[str, ...]]:
    long = [name for name, size in grid.shape.items() if size > 1]
    for count in range(1, len(long) + 1):
        yield from itertools.combinations(long, count)


def _meeting(grid: jax.sharding.Mesh, axes: tuple[str, ...]) -> Any:
    """Returns a small program with an all-reduce over some dimensions of a mesh, taken as one."""
    names = grid.axis_names
    last = [i for i, n in enumerate(names) if n in axes]
    order = [i for i in range(len(names)) if i not in last] + last
    turned = grid.devices.transpose(order)
    size = math.prod(grid.devices.shape[i] for i in last)
    together = jax.sharding.Mesh(turned.reshape(-1, size), ("apart", "together"))
    given = NamedSharding(together, PartitionSpec("apart", "together"))
    left = NamedSharding(together, PartitionSpec("apart", None))
    shape = jax.ShapeDtypeStruct(together.devices.shape, np.float32)
    sums = jax.ShapeDtypeStruct((shape.shape[0], 1), np.float32)

    def add(x: jax.Array) -> jax.Array:
        return x.sum(1, keepdims=True)

    traced = jax.jit(add, in_shardings=given, out_shardings=left).trace(shape)
    module = _jaxlib.bytecode(traced.lower(lowering_platforms=("cpu",)))
    handles = list(together.devices.flat)

    def run() -> None:
        executable = _jaxlib.compile_spmd_program(handles[0].client, handles, module)
        array = _jaxlib.shard_array(np.ones(shape.shape, np.float32), given)
        _jaxlib.make_multi_device_call(executable, [sums], [left])([array])[0].block_until_ready()

    return run


def _serve(host: str, size: int) -> tuple[Any, str]:
    for attempt in range(_ATTEMPTS):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
            port = probe.getsockname()[1]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            return _jaxlib.start_coordination_service(address, size), address
        except Exception as error:  # somebody else took the port in between
            if attempt == _ATTEMPTS - 1:
                raise DeviceError(
                    f"the coordination service of the ranks cannot be started at {address}: "
                    f"{error_text(error)}"
                ) from error
    raise AssertionError


def own_address(other: str) -> str:
    """Returns the local IP address used to reach another host.

    Args:
        other: A name or address; empty: it is not known.
    """
    try:
        found = socket.getaddrinfo(other or socket.gethostname(), 9, type=socket.SOCK_DGRAM)
        family, kind, _, _, address = found[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
