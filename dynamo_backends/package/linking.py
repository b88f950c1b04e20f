"""Linked programs: executables joined with inputs and results, without the graph between.

Of a graph with static shapes a package has, besides the graph, what the pipeline made of it: which
executable reads and writes which values, and the calls that run between them. A process that has
the executables needs no more, and builds no graph.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.graph.graph import Graph, Input, Role
from dynamo_backends.interface.counters import track_executable
from dynamo_backends.interface.executable import Bound, Executable
from dynamo_backends.interface.options import Options
from dynamo_backends.interface.report import GraphReport, Kind
from dynamo_backends.package import calls
from dynamo_backends.package.spec import Spec
from dynamo_backends.runtime.eager_switch import EagerSwitch
from dynamo_backends.runtime.program import (
    Block,
    EagerPart,
    Instruction,
    LiteralOutput,
    Program,
    graph_name,
    make_picker,
    part_names,
)

Run = Callable[[Sequence[Any]], Sequence[Any]]
Load = Callable[[str, Graph], Executable]


def to_dict(program: Any, mark_of: Callable[[Executable], str | None]) -> dict[str, Any] | None:
    """Returns a program in types that JSON has; None: it has something that has no form here.

    Args:
        program: What runs a graph with static shapes.
        mark_of: The key by which an executable can be loaded; None: it cannot.
    """
    if not isinstance(program, Program) or program.constants:
        return None
    parts = []
    for step in program.steps:
        part = _part(step.run, mark_of)
        if part is None:
            return None
        reads = list(step.read(range(program.registers)))
        parts.append({**part, "reads": reads, "writes": step.writes, "dead": step.dead})
    literals = [x.value for x in program.outputs if isinstance(x, LiteralOutput)]
    if not all(type(value) in calls.SCALARS for value in literals):
        return None
    results = [{"value": x.value} if isinstance(x, LiteralOutput) else x for x in program.outputs]
    return {"parts": parts, "registers": program.registers, "results": results}


def _part(run: Any, mark_of: Callable[[Executable], str | None]) -> dict[str, Any] | None:
    if isinstance(run, EagerPart):
        made = calls.to_text(run.graph.module.graph)
        return None if made is None else {"calls": made}
    if not isinstance(run, Block):
        return None
    mark = mark_of(run.executable)
    values = [n.meta.get("val") for n in (*run.graph.placeholders, *run.graph.outputs)]
    if mark is None or run.graph.updates or not all(map(_is_plain, values)):
        return None
    specs = [Spec.of(x).to_dict() for x in values]
    inputs = [[x.name, x.role.value, x.frozen] for x in run.graph.inputs]
    return {"mark": mark, "inputs": inputs, "values": specs}


def _is_plain(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    sizes = (*value.shape, *value.stride())
    return value.device.type == "cpu" and all(type(size) is int for size in sizes)


def linked(
    given: Mapping[str, Any],
    weights: Sequence[Tensor],
    load: Load,
    options: Options,
    report: GraphReport,
    in_eager: Callable[[list[Any]], Sequence[Any]],
) -> Callable[[list[Any]], Sequence[Any]]:
    """Returns what runs a linked program, from the list of inputs, which it clears, to the outputs.

    Args:
        given: From `to_dict`.
        weights: Its first inputs.
        load: Makes an executable of its key, for a graph that has inputs and outputs alone.
        options: Options of the backend.
        report: Gets what becomes of it.
        in_eager: Runs the graph call by call, from the same inputs, where compiled code fails.
    """
    made: dict[str, Executable] = {}
    parts = given["parts"]
    names = part_names(graph_name(report), ["mark" in part for part in parts])
    steps = []
    for part, name in zip(parts, names, strict=True):
        run: Any
        if "calls" in part:
            run = calls.deserialize_callable(part["calls"])
        else:
            run = _block(part, weights, load, made, report)
        reads = make_picker(part["reads"])
        steps.append(Instruction(run, reads, tuple(part["writes"]), tuple(part["dead"]), name))
    results = [LiteralOutput(x["value"]) if isinstance(x, dict) else x for x in given["results"]]
    program = Program(steps, (), given["registers"], results)
    return _Contained(program, in_eager, options, report)


def _block(
    part: Mapping[str, Any],
    weights: Sequence[Tensor],
    load: Load,
    made: dict[str, Executable],
    report: GraphReport,
) -> Run:
    inputs = tuple(Input(name, Role(role), frozen) for name, role, frozen in part["inputs"])
    specs = list(map(Spec.from_dict, part["values"]))
    values = [
        weights[at] if at < len(weights) and Spec.of(weights[at]) == spec else spec.empty()
        for at, spec in zip(part["reads"], specs, strict=False)
    ]
    results = [spec.empty() for spec in specs[len(inputs) :]]
    graph = make_signature_graph(inputs, values, results, "inference")
    mark = part["mark"]
    if mark not in made:
        made[mark] = load(mark, graph)
        made[mark].set_report(report)
        track_executable(made[mark])
    return _Block(graph, made[mark])


class _Block:
    """An executable whose weights stay as they are: they are bound at the first call."""

    def __init__(self, graph: Graph, executable: Executable):
        self._executable = executable
        self._weights, self._activations = (
            make_picker(graph.weights),
            make_picker(graph.activations),
        )
        self._lock = fork_safe_lock()
        self._bound: Bound | None = None

    def __call__(self, values: Sequence[Any]) -> Sequence[Any]:
        """Runs it on one value per graph input."""
        bound = self._bound or self._bind(values)
        return bound(list(self._activations(values)))

    def _bind(self, values: Sequence[Any]) -> Bound:
        with self._lock:
            if self._bound is None:
                self._bound = self._executable.bind(self._weights(values))[0]
            return self._bound


def make_signature_graph(
    inputs: Sequence[Input], values: Sequence[Tensor], results: Sequence[Tensor], kind: Kind
) -> Graph:
    """Makes a graph with only the inputs' and outputs' metadata, without calls."""
    graph = fx.Graph()
    for x, value in zip(inputs, values, strict=True):
        graph.placeholder(x.name).meta["val"] = value
    outputs = []
    for value in results:
        outputs.append(graph.call_function(_not_here))
        outputs[-1].meta["val"] = value
    graph.output(tuple(outputs))
    return Graph(fx.GraphModule(torch.nn.Module(), graph), kind, tuple(inputs))


def _not_here() -> Any:
    raise RuntimeError("a linked program has no graph")


class _Contained:
    """A program, and eager in its place once it has failed."""

    def __init__(
        self,
        program: Program,
        in_eager: Callable[[list[Any]], Sequence[Any]],
        options: Options,
        report: GraphReport,
    ):
        self._program = program
        self._switch = EagerSwitch(in_eager, [report], "graph", options.fallback == "eager")
        self._has_failed = False

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Runs it; clears the list of inputs."""
        if self._has_failed:
            results: Sequence[Any] = self._switch.eager(args)
            return results
        given = list(args)
        try:
            return self._program(args)
        except Exception as error:
            results = self._switch.run_eager_instead(error, given)
            self._has_failed = True
            return results
        finally:
            args.clear()
