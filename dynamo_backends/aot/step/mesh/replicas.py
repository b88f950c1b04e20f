"""`DistributedDataParallel` in a step: what it means is said by a mesh, and it is taken off.

It averages gradients in C++, where a trace does not see it. A mesh of all processes with
`parallel="ddp"` does so in the step's program.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dynamo_backends.interface.errors import OptionError, StepCaptureError
from dynamo_backends.runtime.ranks import is_multiprocess

_TAKEN = (
    "this DistributedDataParallel module was passed to compile_step, which averages gradients "
    "instead of it. A backward pass in eager would not average them. Train through the compiled "
    "step only, and evaluate under torch.no_grad()."
)


def find_ddp_models(models: Sequence[nn.Module]) -> list[Any]:
    """Returns those of a step's models that are wrapped in `DistributedDataParallel`."""
    kind = torch.nn.parallel.DistributedDataParallel
    return [model for model in models if isinstance(model, kind)]


def mesh_of_replicas(replicas: Sequence[Any], mesh: Any, parallel: Any) -> Any:
    """Returns the mesh that replaces `DistributedDataParallel`; None: there is none.

    Raises:
        StepCaptureError: One does more than to average gradients over all processes.
        OptionError: The user asked for another thing.
    """
    for replica in replicas:
        if (reason := _more_than_average(replica)) is not None:
            raise StepCaptureError(
                f"the model is wrapped in DistributedDataParallel, which {reason}. compile_step "
                "does not support this: it computes what one device would compute with the whole "
                "batch. Pass model=model.module and mesh={'data': …}, and call model.module in the "
                "step."
            )
    if replicas and parallel == "fsdp":
        raise OptionError(
            "the model is wrapped in DistributedDataParallel, which requires parallel='ddp'. For "
            "parallel='fsdp' pass model.module."
        )
    if mesh is None and replicas and is_multiprocess():
        return {"data": torch.distributed.get_world_size()}
    return mesh


def _more_than_average(replica: Any) -> str | None:
    """Returns what a replica does besides, in words; None: nothing."""
    size = torch.distributed.get_world_size()
    if torch.distributed.get_process_group_ranks(replica.process_group) != list(range(size)):
        return "averages over a subset of the processes"
    if replica._comm_hooks:
        return "has a communication hook (register_comm_hook)"
    if replica.mixed_precision is not None:
        return "uses mixed precision (mixed_precision)"
    if replica.parameters_to_ignore:
        return "ignores some parameters (parameters_to_ignore)"
    norms = [m for m in replica.modules() if isinstance(m, _BatchNorm)]
    if size > 1 and any(m.training and m.track_running_stats for m in norms):
        return "has batch norm layers that compute statistics on each process's part of the batch"
    return None


def wrap_to_bypass_ddp(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a function so that disabled DDP wrappers call their modules directly."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with bypassing_ddp():
            return function(*args, **kwargs)

    return call


def disable_ddp(replica: Any) -> None:
    """Disables a DDP wrapper: its forward calls the module, its reducer is dropped."""
    module = replica.module

    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and replica.training and not _thread.captures:
            raise StepCaptureError(_TAKEN)
        return module(*args, **kwargs)

    replica.forward = forward
    replica.reducer = replica.logger = None  # they hold the parameters' places in autograd


class _Thread(threading.local):
    captures = False


_thread = _Thread()


@contextlib.contextmanager
def bypassing_ddp() -> Iterator[None]:
    """Lets disabled DDP wrappers call their modules during capture (context manager)."""
    before, _thread.captures = _thread.captures, True
    try:
        yield
    finally:
        _thread.captures = before
