"""Lists the backends that compile whole steps, one row each."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dynamo_backends.aot.step.program.programs import CopyingProgram
from dynamo_backends.aot.step.program.recording import WHAT_TO_DO
from dynamo_backends.graph.decomposition_tables import (
    checked_decomposition_table,
    decomposition_table,
)
from dynamo_backends.graph.graph import Graph, source_line
from dynamo_backends.graph.planned_decomposition import compile_with_plan, fingerprint_with_plan
from dynamo_backends.graph.random_draws import decompose_dropout
from dynamo_backends.interface import protocols
from dynamo_backends.interface.backend import Backend
from dynamo_backends.interface.errors import (
    DynamoBackendsError,
    OptionError,
    RankError,
    StepCaptureError,
    StepOperatorError,
    first_line,
)
from dynamo_backends.interface.executable import StepProgram
from dynamo_backends.interface.mesh import Mesh, MeshLayout
from dynamo_backends.interface.options import Options
from dynamo_backends.interface.plan import Plan
from dynamo_backends.interface.protocols import MeshTarget
from dynamo_backends.interface.registry import get_backend, import_attribute, require_available
from dynamo_backends.runtime.load_or_compile import load_or_compile


@dataclass(frozen=True)
class StepBackend:
    """One backend's way of compiling steps.

    Attributes:
        name: Its name.
        decompositions: What is decomposed while tracing.
        compile: Makes a program of a graph with static shapes.
        verify: Which steps are compared with eager (see `Options.verify`).
        strict: What is wrong raises instead of being taken in eager.
        reduced: Whether the user admits bfloat16.
        home: The device on which what lives from step to step stays; None: torch's own.
        target: The mesh over which steps are spread; None: they are not.
        compile_on_mesh: Makes a program for it; None without.
        keeps_scalars_on_device: See `Options.keeps_scalars_on_device`.
    """

    name: str
    decompositions: Mapping[Any, Callable[..., Any]]
    compile: Callable[[Graph], StepProgram]
    verify: str = "first"
    strict: bool = False
    reduced: bool = False
    home: str | None = None
    target: MeshTarget | None = None
    compile_on_mesh: Callable[[Graph, MeshLayout], StepProgram] | None = None
    keeps_scalars_on_device: bool = False

    @property
    def draws_seeds(self) -> bool:
        """Returns whether steps draw from seeds that torch draws (`replace_draws_by_seeded`)."""
        return self.home is not None and self.target is None


def step_backend(
    name: str,
    options: Mapping[str, Any] | None,
    home: str | None = None,
    mesh: Mesh | None = None,
) -> StepBackend:
    """Returns the way of a backend with steps.

    Args:
        name: One of torch's own that have a row in `TORCHS`, or one of `get_backend`.
        options: Options of a backend of this package.
        home: The device that torch does not know on which tensors of the step live already.
        mesh: Over which steps are spread.

    Raises:
        UnknownBackendError: There is no such backend.
        BackendUnavailableError: It cannot run here.
        OptionError: An option is wrong, or the backend has no steps on a mesh.
        DeviceError: There are too few devices for the mesh.
    """
    if name in TORCHS:
        if mesh is not None:
            raise OptionError(
                f"{name} does not support mesh in compile_step. Pass backend='openxla', or remove "
                "mesh."
            )
        if options:
            raise OptionError(
                f"{name} is a torch backend and takes no options in compile_step, got {options}"
            )
        return import_attribute(TORCHS[name])()
    backend = get_backend(name)
    require_available(backend)
    parsed = backend.Options.parse(dict(options or {}), name)
    parsed.refuse_background_compile(f"compile_step with {name}")
    parsed.require_dynamo_capture(f"compile_step with {name}")
    if home is not None:
        parsed = protocols.options_for_device(backend, parsed, home)
    stays = (
        protocols.resident_device(backend, parsed) if mesh is None else None
    )  # opens the device of the options
    rules = checked_decomposition_table if mesh is None and stays is None else decomposition_table
    table = rules(keep=frozenset(backend.preserved_operators(parsed)))
    target = None if mesh is None else _target_of(backend, parsed, mesh)
    return StepBackend(
        name,
        table,
        lambda graph: compile_whole(backend, parsed, graph),
        verify="off" if backend.is_verified else str(parsed.verify),
        strict=parsed.fallback == "error",
        reduced=parsed.allows_reduced_precision,
        home=stays if target is None else target.name,
        target=target,
        compile_on_mesh=None if target is None else _for_mesh(backend, parsed, target),
        keeps_scalars_on_device=parsed.keeps_scalars_on_device,
    )


def _target_of(backend: Backend, options: Options, mesh: Mesh) -> MeshTarget:
    if not isinstance(backend, protocols.SpansMesh):
        raise OptionError(
            f"{backend.name} does not support mesh in compile_step. Pass backend='openxla', or "
            "remove mesh."
        )
    return backend.make_mesh_target(options, mesh)


def _for_mesh(
    backend: Backend, options: Options, target: MeshTarget
) -> Callable[[Graph, MeshLayout], StepProgram]:
    def make(graph: Graph, layout: MeshLayout) -> StepProgram:
        plan = backend.plan(graph, options)
        _check_whole(backend, graph, plan)
        compile_copy = lambda copy: target.compile_step(copy, layout)  # noqa: E731
        with _as_capture_error(backend):
            return compile_with_plan(backend, options, plan, graph, compile_copy)

    return make


def _eager() -> StepBackend:
    def compile_graph(graph: Graph) -> StepProgram:
        module = graph.copy().module
        # Kernels may give other strides than torch's traces of them say.
        for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
            node.target = torch.ops.aten.reshape.default
        module.recompile()
        return CopyingProgram(graph, lambda inputs: module.forward(*inputs))

    # Masks are drawn before the graph runs, and a checkpoint has its own again.
    table = {torch.ops.aten.native_dropout.default: decompose_dropout}
    return StepBackend("aot_eager", table, compile_graph, verify="off")


TORCHS: dict[str, str] = {
    "eager": f"{__name__}:_eager",
    "aot_eager": f"{__name__}:_eager",
    "inductor": "dynamo_backends.inductor.steps:step_backend",
}
"""Torch's own backends, and where their ways are; modules are loaded when they are asked for."""


def compile_whole(backend: Backend, options: Options, graph: Graph) -> StepProgram:
    """Compiles the graph of a step by a backend of this package, all of it or nothing.

    Raises:
        StepOperatorError: The backend cannot run all of it.
        DynamoBackendsError: It can run none of it, and the user has to change something.
    """
    backend.check_graph(graph, options)
    plan = backend.plan(graph, options)
    _check_whole(backend, graph, plan)
    with _as_capture_error(backend):
        return program_of_step(backend, options, plan, graph)


@contextlib.contextmanager
def _as_capture_error(backend: Backend) -> Iterator[None]:
    try:
        yield
    except RankError:
        raise
    except DynamoBackendsError as error:
        raise StepOperatorError(f"{backend.name} cannot compile the step: {error}") from error


def _check_whole(backend: Backend, graph: Graph, plan: Plan) -> None:
    for node in graph.calls:
        if node.name in plan.eager:
            where = source_line(node)
            raise StepOperatorError(
                f"{backend.name} cannot run {node.target} in a step: {plan.eager[node.name]}"
                + (f" (called at {where})" if where else "")
                + '. Use another backend ("inductor", "aot_eager"), or pass fallback="split" to '
                "run such operators in eager between compiled parts."
            )


def program_of_step(backend: Backend, options: Options, plan: Plan, graph: Graph) -> StepProgram:
    """Loads a step's program from the disk cache, or compiles it.

    Args:
        backend: What compiles it.
        options: Options of the backend.
        plan: Plan of the graph; it leaves no call to eager.
        graph: Graph of the kind "step"; not changed.

    Raises:
        DynamoBackendsError: The backend cannot compile it.
    """

    def load(parts: Mapping[str, bytes]) -> StepProgram:
        assert isinstance(backend, protocols.SavesSteps), backend
        program = backend.load_step(parts, graph.copy(), options)
        program.from_disk = True
        return program

    make = lambda: _compiled(backend, options, plan, graph)  # noqa: E731
    return load_or_compile(backend, options, _mark(graph, plan), load, make)


def parts_of_step(backend: Backend, options: Options, plan: Plan, graph: Graph) -> dict[str, bytes]:
    """Returns the serialized parts of a cached step; compiles it if they are gone.

    A program that was loaded is not dumped again: XLA's lack functions then.
    """
    make = lambda: _Parts(_compiled(backend, options, plan, graph).dump() or {})  # noqa: E731
    return load_or_compile(backend, options, _mark(graph, plan), _Parts, make).parts


class _Parts:
    def __init__(self, parts: Mapping[str, bytes]):
        self.parts = dict(parts)

    def dump(self) -> dict[str, bytes] | None:
        """See `StepProgram.dump`."""
        return self.parts or None


def _mark(graph: Graph, plan: Plan) -> str:
    return f"step {fingerprint_with_plan(graph, plan)} {[x.updated_by for x in graph.inputs]}"


def _compiled(backend: Backend, options: Options, plan: Plan, graph: Graph) -> StepProgram:
    def compile_whole(copy: Graph) -> StepProgram:
        if isinstance(backend, protocols.CompilesSteps):
            program = backend.compile_step(copy.copy(), options)
            if program is not None:
                return program
        return CopyingProgram(graph, backend.compile(copy, options).bind(())[0])

    return compile_with_plan(backend, options, plan, graph, compile_whole)


_WITH_SPARSE = ("aot_eager",)


def refuse_sparse(graph: Graph, backend: str) -> None:
    """Refuses sparse tensors, such as gradients of `nn.Embedding(sparse=True)`.

    Raises:
        StepCaptureError: There are some, and the backend has none.
    """
    if backend in _WITH_SPARSE:
        return
    for node in graph.calls:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.layout is not torch.strided:
            where = source_line(node)
            raise StepCaptureError(
                f"{backend} does not support sparse tensors, which the step creates"
                + (f" at {where}" if where else "")
                + '. Use nn.Embedding(sparse=False), backend="aot_eager", or fallback="split".'
            )


def refuse_shared_writes(
    graph: Graph, names: Sequence[str], batch: Sequence[Any], groups: Sequence[Sequence[int]]
) -> None:
    """Refuses writes to an argument that overlaps with another one.

    Raises:
        StepCaptureError: There is one.
    """
    inputs = dict(zip(names, graph.inputs, strict=False))
    for group in groups:
        places = dict.fromkeys(group)
        written = [i for i in places if inputs[f"batch[{i}]"].updated_by is not None]
        if written and len({id(batch[i]) for i in places}) > 1:
            several = ", ".join(f"batch[{i}]" for i in places)
            raise StepCaptureError(
                f"the step writes to batch[{written[0]}], but {several} share storage, which is "
                "not supported. Pass a copy (clone()), or write to a copy in the function."
            )


@contextlib.contextmanager
def reporting_compile_errors(backend: str) -> Iterator[None]:
    """Turns errors of step compilation into `StepCaptureError` (context manager)."""
    try:
        yield
    except DynamoBackendsError:
        raise
    except Exception as error:
        raise StepCaptureError(
            f"{backend} cannot compile the step: {type(error).__name__}: {first_line(error)} "
            + WHAT_TO_DO
        ) from error
