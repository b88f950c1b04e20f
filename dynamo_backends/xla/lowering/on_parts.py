"""Runs a program on each device's part of the batch, within a program that XLA splits by itself."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec


def on_parts(
    grid: Mesh,
    program: Callable[..., jax.Array],
    split: Sequence[jax.Array],
    whole: Sequence[jax.Array] = (),
    *,
    is_sum: bool = False,
) -> jax.Array:
    """The result of a program that is linear over the batch, or that takes its rows one by one.

    Args:
        grid: The devices; all of them together have the batch once.
        program: Is traced for one device.
        split: Its first arguments: arrays of which each device has a part of the first dimension,
            which the number of devices divides.
        whole: Its other arguments, which each device has whole.
        is_sum: Devices' results are added; otherwise they are parts of the first dimension.
    """
    axes = grid.axis_names
    rows, all_of_it = PartitionSpec(axes), PartitionSpec()

    def on_a_device(*arrays: jax.Array) -> Any:
        result = program(*arrays)
        return jax.lax.psum(result, axes) if is_sum else result

    spread = jax.shard_map(
        on_a_device,
        mesh=grid,
        in_specs=(rows,) * len(split) + (all_of_it,) * len(whole),
        out_specs=all_of_it if is_sum else rows,
        check_vma=False,
    )
    result: jax.Array = spread(*split, *whole)
    return result
