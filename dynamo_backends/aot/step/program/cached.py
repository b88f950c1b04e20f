"""Compiled steps on disk: a second process loads what a first one compiled."""

from collections.abc import Mapping

from dynamo_backends.aot.step.program.programs import CopyingProgram, StepProgram
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.planned import compile_planned, planned_fingerprint
from dynamo_backends.interface import protocols
from dynamo_backends.interface.backend import Backend
from dynamo_backends.interface.options import Options
from dynamo_backends.interface.plan import Plan
from dynamo_backends.runtime.load_or_compile import load_or_compile


def program_of_step(backend: Backend, options: Options, plan: Plan, graph: Graph) -> StepProgram:
    """Returns the program of a step, from disk if it is there.

    Args:
        backend: What compiles it.
        options: Of the backend.
        plan: Of the graph; it leaves no call to eager.
        graph: Of the kind "step"; not changed.

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
    """What is kept on disk of a step that was loaded; it is compiled where that is gone.

    A program that was loaded is not dumped again: XLA's lack functions then.

    Args:
        backend: See `program_of_step`.
        options: Likewise.
        plan: Likewise.
        graph: Likewise.
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
    return f"step {planned_fingerprint(graph, plan)} {[x.updated_by for x in graph.inputs]}"


def _compiled(backend: Backend, options: Options, plan: Plan, graph: Graph) -> StepProgram:
    def compile_whole(copy: Graph) -> StepProgram:
        if isinstance(backend, protocols.CompilesSteps):
            program = backend.compile_step(copy.copy(), options)
            if program is not None:
                return program
        return CopyingProgram(graph, backend.compile(copy, options).bind(())[0])

    return compile_planned(backend, options, plan, graph, compile_whole)
