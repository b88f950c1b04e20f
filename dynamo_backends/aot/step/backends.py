"""Which backends take whole steps, and how: one row each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from dynamo_backends.aot.step.cached import load_or_compile
from dynamo_backends.aot.step.programs import CopyingProgram, StepProgram
from dynamo_backends.graph.decompositions import decompositions
from dynamo_backends.graph.graph import Graph, source_line
from dynamo_backends.graph.random import dropout
from dynamo_backends.interface.backend import Backend
from dynamo_backends.interface.containment import require_available
from dynamo_backends.interface.errors import DynamoBackendsError, OptionError, StepCaptureError
from dynamo_backends.interface.options import Options
from dynamo_backends.interface.registry import get_backend, load


@dataclass(frozen=True)
class StepBackend:
    """How a backend compiles steps.

    Attributes:
        name: Its name.
        decompositions: What is decomposed while tracing.
        compile: Makes a program of a graph with static shapes.
        verify: Which steps are compared with eager (see `Options.verify`).
        strict: What is wrong raises instead of being taken in eager.
        reduced: Whether the user admits bfloat16.
    """

    name: str
    decompositions: Mapping[Any, Callable[..., Any]]
    compile: Callable[[Graph], StepProgram]
    verify: str = "first"
    strict: bool = False
    reduced: bool = False


def step_backend(name: str, options: Mapping[str, Any] | None) -> StepBackend:
    """The way of a backend with steps.

    Args:
        name: One of torch's own that have a row in `_TORCHS`, or one of `get_backend`.
        options: Of a backend of this package.

    Raises:
        UnknownBackendError: There is no such backend.
        BackendUnavailableError: It cannot run here.
        OptionError: An option is wrong.
    """
    if name in _TORCHS:
        if options:
            raise OptionError(f"{name} is torch's own and has no options for steps, got {options}")
        torchs: StepBackend = load(_TORCHS[name])()
        return torchs
    backend = get_backend(name)
    require_available(backend)
    parsed = backend.Options.parse(dict(options or {}), name)
    table = decompositions(keep=frozenset(backend.keeps(parsed)))
    return StepBackend(
        name,
        table,
        lambda graph: compile_whole(backend, parsed, graph),
        verify="off" if backend.is_verified else str(parsed.verify),
        strict=parsed.fallback == "error",
        reduced=parsed.is_reduced,
    )


def _eager() -> StepBackend:
    def compile_graph(graph: Graph) -> StepProgram:
        module = graph.module
        return CopyingProgram(graph, lambda inputs: module.forward(*inputs))

    # Masks are drawn before the graph runs, and a checkpoint has its own again.
    table = {torch.ops.aten.native_dropout.default: dropout}
    return StepBackend("aot_eager", table, compile_graph, verify="off")


# torch's own backends, and where their ways are: modules are loaded when somebody asks for them.
_TORCHS: dict[str, str] = {
    "eager": f"{__name__}:_eager",
    "aot_eager": f"{__name__}:_eager",
    "inductor": "dynamo_backends.inductor.steps:step_backend",
}


def compile_whole(backend: Backend, options: Options, graph: Graph) -> StepProgram:
    """Compiles the graph of a step by a backend of this package, all of it or nothing.

    Args:
        backend: What compiles it.
        options: Of the backend.
        graph: In the backend's dialect; not changed.

    Raises:
        StepCaptureError: The backend cannot run all of it.
        DynamoBackendsError: It can run none of it, and the user has to change something.
    """
    backend.prepare(graph, options)
    _check_supported(backend, options, graph)
    try:
        return load_or_compile(backend, options, graph)
    except DynamoBackendsError as error:
        raise StepCaptureError(f"{backend.name} cannot compile the step: {error}") from error


def _check_supported(backend: Backend, options: Options, graph: Graph) -> None:
    for node in graph.calls:
        support = _supports(backend, options, node)
        if support is not None:
            where = source_line(node)
            raise StepCaptureError(
                f"{backend.name} cannot run {node.target} in a step: {support}"
                + (f" (called at {where})" if where else "")
                + '. Use another backend ("inductor", "aot_eager"), or pass fallback="split" to '
                "run such operators in eager between compiled parts."
            )


def _supports(backend: Backend, options: Options, node: fx.Node) -> str | None:
    import operator

    if node.target is operator.getitem:
        return None
    support = backend.supports(node, options)
    return None if support else support.reason
