"""Finds what acts on a step from outside of its trace, which a graph would leave out.

DistributedDataParallel averages gradients in C++, collectives talk to other processes, and a
replica runs in a thread of its own. None of them sees the tensors of a trace. Such a step is
refused.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dynamo_backends._torch_private import global_optimizer_hooks
from dynamo_backends.runtime import weight_binding

_SPLIT = (
    'pass fallback="split": torch.compile then compiles the parts of the step, and {} as in eager'
)


@dataclass(frozen=True)
class _Refused:
    """A kind of module that no step can hold."""

    module: str
    name: str
    why: str
    way_out: str
    applies: Callable[[Any], bool] = lambda _: True


_BY_MESH = (
    "leave the wrapper out and pass mesh={'data': …}, parallel='fsdp', which splits parameters, "
    "gradients and state, or "
)
_EACH_ITS_OWN = "each process would train a separate model"

_WRAPPERS = (
    _Refused(
        "torch.nn.parallel.distributed",
        "DistributedDataParallel",
        "averages gradients between processes in C++, which tracing does not capture: "
        + _EACH_ITS_OWN,
        "give compile_step the wrapper itself, model=ddp, or "
        + _SPLIT.format("gradients are averaged")
        + ". Or compile the model alone, torch.compile(model), before it is wrapped",
    ),
    _Refused(
        "torch.distributed._composable.replicate",
        "DDP",
        "(replicate) averages gradients between processes in C++: " + _EACH_ITS_OWN,
        _SPLIT.format("gradients are averaged"),
    ),
    _Refused(
        "torch.distributed.fsdp.fully_sharded_data_parallel",
        "FullyShardedDataParallel",
        "gathers parameters from other processes while the model runs",
        _BY_MESH + _SPLIT.format("parameters are gathered"),
    ),
    _Refused(
        "torch.distributed.fsdp._fully_shard._fully_shard",
        "FSDPModule",
        "(fully_shard) gathers parameters from other processes while the model runs",
        _BY_MESH + _SPLIT.format("parameters are gathered"),
    ),
    _Refused(
        "torch.nn.parallel.data_parallel",
        "DataParallel",
        "copies the model to several devices and runs it in several threads",
        "use one device: " + "compile_step(..., model=model.module)",
        lambda module: len(module.device_ids) > 1,
    ),
)


def outside_effect(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> str | None:
    """Returns why a step of these models cannot be compiled; None if it can."""
    for model in models:
        for path, module in model.named_modules():
            reason = _of_module(module)
            if reason is not None:
                return reason
            for name, parameter in module.named_parameters(recurse=False):
                reason = _of_parameter(f"{path}.{name}".lstrip("."), parameter)
                if reason is not None:
                    return reason
    for number, optimizer in enumerate(optimizers):
        if isinstance(optimizer, torch.optim.SparseAdam):
            return (
                "SparseAdam counts its steps in a Python scalar, "
                "which a compiled graph cannot change. Use "
                "nn.Embedding(sparse=False) with Adam, or " + _SPLIT.format("it runs") + "."
            )
        for group in optimizer.param_groups:
            for i, parameter in enumerate(group["params"]):
                reason = _of_parameter(f"optimizer[{number}].params[{i}]", parameter)
                if reason is not None:
                    return reason
    return None


def _of_module(module: nn.Module) -> str | None:
    for row in _WRAPPERS:
        # Without an import: where nobody has imported it, there is no instance.
        kind = getattr(sys.modules.get(row.module), row.name, None)
        if kind is not None and isinstance(module, kind) and row.applies(module):
            return (
                f"{row.name} {row.why}. compile_step cannot compile such a step as one graph: "
                f"{row.way_out}."
            )
    return None


def _of_parameter(name: str, parameter: Tensor) -> str | None:
    tensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if tensor is not None and isinstance(parameter, tensor):
        return (
            f"the parameter {name} is a DTensor, which is "
            "distributed over several processes. "
            "compile_step cannot compile such a step as "
            "one graph: make it an ordinary parameter and "
            "pass mesh and placements to compile_step, or " + _SPLIT.format("processes communicate")
        )
    return None


def has_global_hooks() -> bool:
    """Returns whether the user has hooks of all modules or optimizers of the process.

    Frozen weights have one of this package (`runtime.weight_binding`): a program of a step counts
    the versions of what it updates, which tells them as well.
    """
    if not any(_GLOBAL_HOOKS):
        return False
    hooks = chain.from_iterable(map(dict.values, _GLOBAL_HOOKS))
    return any(getattr(hook, "__module__", None) != weight_binding.__name__ for hook in hooks)


_GLOBAL_HOOKS: Any = global_optimizer_hooks()
