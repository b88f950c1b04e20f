"""`compile_step`: a whole training step as one graph."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from dynamo_backends.aot.step.accumulation import Precision, check_precision_option, in_bfloat16
from dynamo_backends.aot.step.frozen import FrozenStep
from dynamo_backends.aot.step.mesh.parallel import parallel_of
from dynamo_backends.aot.step.mesh.replicas import (
    disable_ddp,
    find_ddp_models,
    mesh_of_replicas,
    wrap_to_bypass_ddp,
)
from dynamo_backends.aot.step.program.recording import Definition
from dynamo_backends.aot.step.step import Step
from dynamo_backends.interface.errors import OptionError


def compile_step(
    function: Callable[..., Any],
    *,
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    backend: str = "openxla",
    options: Mapping[str, Any] | None = None,
    accumulate: int = 1,
    fallback: Literal["error", "split"] = "error",
    mesh: Any = None,
    parallel: Literal["ddp", "fsdp"] | None = None,
    placements: Mapping[str, Sequence[Any]] | None = None,
    batch_placements: Sequence[Any] | None = None,
    precision: Precision = "float32",
    python: Literal["replay", "frozen"] = "replay",
) -> "Step":
    """Compiles a training step: forward, backward and update become one graph.

    Examples:
        >>> def train(images, labels):
        ...     loss = F.cross_entropy(model(images), labels)
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     return loss
        >>> step = compile_step(train, model=model, optimizer=optimizer)
        >>> loss = step(images, labels)

    Args:
        function: Ordinary PyTorch. It runs at every call; its torch calls are compared with a
            record instead of being executed, and the program of that record runs once at the end
            (docs/compile-step.md). The first call runs in eager and makes the record.
        model: Every module whose parameters or buffers it uses. One in `DistributedDataParallel`
            means a mesh of all processes (docs/scaling.md).
        optimizer: Every optimizer that it steps.
        backend: "openxla", "inductor", "aot_eager", or another backend of this package.
        options: Options of the backend.
        accumulate: In how many parts the batch is taken; gradients are averaged over them.
        fallback: What to do where a call cannot be compiled: raise `StepCaptureError` ("error"), or
            run the rest of the call in eager, with a warning that has the reason ("split").
        mesh: Several devices over which the step is spread (docs/scaling.md): a torch `DeviceMesh`,
            or names and sizes of its dimensions, such as {"data": 4, "model": 2}. With several
            processes of torch.distributed one device of each, and each gives a part of the batch.
        parallel: "ddp" (the default with a mesh): each device has all parameters; "fsdp": each has
            a part of them and of their state.
        placements: Of single parameters, by patterns of their names: one `Shard` or `Replicate` of
            `torch.distributed.tensor` for each dimension of the mesh.
        batch_placements: Of the tensors of a batch, likewise. By default their first dimension is
            split over the dimensions of the mesh that split no parameter in `placements`.
        precision: "bf16": the forward pass runs under autocast to bfloat16, the backward pass and
            the optimizers outside of it; parameters and their state stay in float32. "float32":
            all is computed in the dtypes that the function has.
        python: "replay": the function runs at every call. "frozen": as "replay" until two calls
            have done the same; from then on Python does not run any more for such calls. What is
            compared then is the arguments, the model's parameters, buffers and training mode, the
            optimizers' numbers and torch's modes: what else the function does (print, count, log,
            step a scheduler) does not happen, and a value that it needs in Python is refused. For
            tiny models, whose time is Python's.

    Raises:
        OptionError: An argument is not valid.
        DeviceError: There are fewer devices than the mesh has.
        UnknownBackendError: There is no such backend.
        BackendUnavailableError: The backend cannot run here.
        RankError: Another process of the mesh does not come.
        StepCaptureError: A model or an optimizer can be part of no program, and `fallback` is
            "error".
    """
    _check_arguments(fallback, accumulate, mesh, python)
    check_precision_option(precision)
    models = _several(model, nn.Module, "model")
    optimizers = _several(optimizer, torch.optim.Optimizer, "optimizer")
    replicas: list[Any] = []
    if fallback == "error":
        replicas = find_ddp_models(models)
        mesh = mesh_of_replicas(replicas, mesh, parallel)
        models = tuple(m.module if m in replicas else m for m in models)
    spread = parallel_of(mesh, parallel, placements, batch_placements, models)
    if precision == "bf16":
        function = in_bfloat16(function, models, optimizers)
    if python == "frozen" and (spread is not None or replicas):
        raise OptionError('python="frozen" does not support mesh. Pass python="replay".')
    if replicas:
        function = wrap_to_bypass_ddp(function)
    definition = Definition(function, models, optimizers, accumulate, spread)
    step = _KINDS[python](definition, backend, options, fallback)
    for replica in replicas:
        disable_ddp(replica)
    return step


_KINDS: dict[str, type[Step]] = {"replay": Step, "frozen": FrozenStep}


def _check_arguments(fallback: str, accumulate: int, mesh: Any, python: str) -> None:
    if python not in _KINDS:
        raise OptionError(f"python must be 'replay' or 'frozen', not {python!r}")
    if fallback not in ("error", "split"):
        raise OptionError(f"fallback must be 'error' or 'split', not {fallback!r}")
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise OptionError(f"accumulate must be a positive integer, not {accumulate!r}")
    if mesh is not None and fallback == "split":
        raise OptionError(
            'mesh cannot be combined with fallback="split", because parts that run in eager would '
            'run on one device only. Pass fallback="error", or remove mesh.'
        )


def _several(given: Any, kind: type, name: str) -> tuple[Any, ...]:
    several = tuple(given) if isinstance(given, list | tuple) else (given,)
    for each in several:
        if not isinstance(each, kind):
            raise OptionError(
                f"{name} must be a {kind.__name__} or a list of them, not {type(each).__name__}"
            )
    return several
