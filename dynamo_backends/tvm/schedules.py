"""Default schedules for a CPU: in which order the loops of each fused function run.

TVM by itself leaves loops as they were written: the innermost one sums, where no vector instruction
helps, and nothing runs in parallel. Here

- a contraction (matrix product, convolution) computes a tile of its output in registers, some rows
  times some vectors (`tiling`), and what follows it (bias, activation) is done on the tile;
- another reduction has the dimension that lies together in memory innermost;
- every block runs in parallel over its outer dimensions.

A function that they do not fit stays as it was written, which is right and slow.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

from dynamo_backends.tvm.tiling import (
    Contraction,
    find_contraction,
    keep_vectors_together,
    output_size,
    tile,
    tile_sizes,
)
from dynamo_backends.tvm.vendor import tvm

_PARALLEL = 1 << 14
"""Blocks of fewer steps than this run in one thread: waking others takes longer."""

_SPATIAL = 0
"""What TVM calls a dimension of the output."""


def schedule(module: Any, threads: int, lanes: int) -> Any:
    """Returns a module whose functions are scheduled.

    Args:
        module: Fused functions, and Relax functions that call them.
        threads: That a graph has.
        lanes: float32 numbers in one of the processor's vectors.
    """
    for name, function in module.functions_items():
        if isinstance(function, tvm.tirx.PrimFunc) and "tirx.is_scheduled" not in function.attrs:
            module[name] = apply_default_schedule(function, threads, lanes)
    return module


def apply_default_schedule(function: Any, threads: int, lanes: int) -> Any:
    """Applies the default schedule to a function; returns it as it was if none fits.

    Args:
        function: A fused function.
        threads: See `schedule`.
        lanes: See `schedule`.
    """
    # Each attempt begins anew: a schedule that failed is left half done.
    for attempt in (_with_tile, _block_by_block):
        with contextlib.suppress(Exception):
            result = attempt(tvm.s_tir.Schedule(function), threads, lanes)
            if result is not None:
                return _done(result)
    return function


def with_tile(function: Any, threads: int, lanes: int, size: tuple[int, int]) -> Any:
    """A function around one contraction, with tiles of a size; raises if that does not fit."""
    return _done(_with_tile(tvm.s_tir.Schedule(function), threads, lanes, size))


def tiles(function: Any, lanes: int) -> list[tuple[int, int]]:
    """Sizes of tiles for `with_tile`, the default one first; none if it is no contraction."""
    plan = tvm.s_tir.Schedule(function)
    found = _contraction(plan)
    if found is None:
        return []
    with contextlib.suppress(ValueError):
        return tile_sizes(*output_size(plan, *found[1:]), lanes)
    return []


def _done(plan: Any) -> Any:
    return plan.mod["main"].with_attr("tirx.is_scheduled", True)


def _with_tile(plan: Any, threads: int, lanes: int, size: tuple[int, int] | None = None) -> Any:
    """Returns a function around one contraction; None if it is none."""
    found = _contraction(plan)
    if found is None:
        return None
    blocks, block, contraction = found
    if size is None:
        size = tile_sizes(*output_size(plan, block, contraction), lanes)[0]
    return _tiled(plan, blocks, block, contraction, threads, size)


def _contraction(plan: Any) -> tuple[Sequence[Any], Any, Contraction] | None:
    """The blocks of a function, the one that contracts, and how; None if that is not one."""
    root = plan.get_sblock("root")
    _inline(plan, root)
    blocks = list(plan.get_child_blocks(root))
    found = [(b, c) for b in blocks if (c := find_contraction(plan, b)) is not None]
    if len(found) != 1:
        return None
    return (blocks, *found[0])


def _tiled(
    plan: Any,
    blocks: Sequence[Any],
    block: Any,
    found: Contraction,
    threads: int,
    size: tuple[int, int],
) -> Any:
    at = [plan.get(b).name_hint for b in blocks].index(plan.get(block).name_hint)
    followers = list(blocks[at + 1 :]) or [plan.cache_write(block, 0, "global")]
    keep_vectors_together(plan, block, found)
    inner = tile(plan, block, found, size, threads > 1)
    for follower in followers:
        plan.reverse_compute_at(follower, inner)
    for leader in blocks[:at]:
        _order(plan, leader, threads)
    return plan


def _block_by_block(plan: Any, threads: int, lanes: int) -> Any:
    root = plan.get_sblock("root")
    _inline(plan, root)
    for block in plan.get_child_blocks(root):
        _order(plan, block, threads)
    return plan


def _inline(plan: Any, root: Any) -> None:
    """Computes what is used once where it is used."""
    for block in list(plan.get_child_blocks(root))[:-1]:
        users = plan.get_consumers(block)
        if len(users) == 1 and not any(_reduces(plan, b) for b in (block, users[0])):
            with contextlib.suppress(Exception):
                plan.compute_inline(block)


def _reduces(plan: Any, block: Any) -> bool:
    return any(int(axis.iter_type) != _SPATIAL for axis in plan.get(block).iter_vars)


def _order(plan: Any, block: Any, threads: int) -> None:
    """Puts a block's loops in order and runs the outer ones in parallel."""
    axes = plan.get(block).iter_vars
    loops = list(plan.get_loops(block))
    if len(axes) != len(loops) or not loops:
        return
    steps = 1
    for loop in loops:
        steps *= int(plan.get(loop).extent)
    kinds = [int(axis.iter_type) for axis in axes]
    spatial = [loop for loop, kind in zip(loops, kinds, strict=True) if kind == _SPATIAL]
    summed = [loop for loop, kind in zip(loops, kinds, strict=True) if kind != _SPATIAL]
    along = bool(summed) and len(spatial) > 1 and _reads_along(plan, block)
    outer = spatial if summed and not along else spatial[:-1]
    if along:
        plan.reorder(*outer, *summed, spatial[-1])
    if outer and threads > 1 and steps >= _PARALLEL:
        plan.parallel(plan.fuse(*outer))
    if along:
        plan.decompose_reduction(block, summed[0])


def _reads_along(plan: Any, block: Any) -> bool:
    """Returns whether neighbouring results are made from neighbouring elements."""
    statement = plan.get(block)
    last = [a.var for a in statement.iter_vars if int(a.iter_type) == _SPATIAL][-1]
    indices = [region.region[-1].min for region in statement.reads if len(region.region)]
    read = [tvm.tirx.analysis.undefined_vars(index) for index in indices]
    return any(last.same_as(v) for variables in read for v in variables)
