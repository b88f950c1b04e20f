"""Which process groups of torch.distributed are those of programs of all processes."""

import torch

from dynamo_backends import _torch_private as private
from dynamo_backends.runtime.ranks.ranks import is_shared


def why_apart(name: object) -> str | None:
    """Returns why a collective of a process group is left to torch; None: it need not be.

    Args:
        name: Of the group, as calls of `_c10d_functional` have it.
    """
    if not isinstance(name, str):
        return "its process group is not known while the graph is compiled"
    if not is_shared():
        return "torch.distributed has one process here"
    group = private.process_group(name)
    if group is None:
        return f"there is no process group {name!r} any more"
    ranks, size = (
        torch.distributed.get_process_group_ranks(group),
        torch.distributed.get_world_size(),
    )
    if ranks != list(range(size)):
        return f"its process group has the ranks {ranks}; XLA's programs are of all {size}"
    backend = private.cpu_backend(group)
    return None if backend == "gloo" else f"its process group talks through {backend}, not gloo"
