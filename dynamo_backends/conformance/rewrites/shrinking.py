"""The smallest graph, and the simplest values, with which something is still wrong."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dynamo_backends.conformance.rewrites.graphs import Call, Input, RandomGraph
from dynamo_backends.conformance.rewrites.operators import FLOATS

Values = Mapping[str, Tensor]

_FEW = 8  # elements, of which each is tried alone


@dataclass(frozen=True)
class Case:
    """A graph, and the inputs of a call after the first."""

    graph: RandomGraph
    values: Values


def shrink(case: Case, fails: Callable[[Case], bool], limit_s: float = 30.0) -> Case:
    """Returns the smallest case that still fails, within a time limit.

    Args:
        case: One that fails.
        fails: Whether a case does.
        limit_s: Seconds after which no further case is tried.
    """
    end = time.monotonic() + limit_s
    progress = True
    while progress:
        progress = False
        for smaller in (*_one_output(case), *_fewer_calls(case), *_fewer_elements(case)):
            if time.monotonic() > end:
                return case
            if _is_valid(smaller) and fails(smaller):
                case, progress = smaller, True
                break
    for simpler in (_simpler_constants, _simpler_values):
        case = simpler(case, fails, end)
    return case


def _is_valid(case: Case) -> bool:
    try:
        case.graph.run(case.values)
    except (RuntimeError, IndexError, TypeError, ValueError):
        return False
    return bool(case.graph.calls)


def _one_output(case: Case) -> Iterator[Case]:
    if len(case.graph.outputs) > 1:
        for name in case.graph.outputs:
            yield _with(case, dataclasses.replace(case.graph, outputs=(name,)))


def _fewer_calls(case: Case) -> Iterator[Case]:
    """Results in the middle; inputs in the place of calls; calls left out."""
    graph = case.graph
    for call in graph.calls[:-1]:
        yield _with(case, dataclasses.replace(graph, outputs=(call.result,)))
    known = graph.run(case.values)
    names = {x.name for x in graph.inputs}
    for i, call in reversed(list(enumerate(graph.calls[:-1]))):
        value = known[call.result]
        if call.result in names or value.dtype in (torch.float16, torch.bfloat16):
            continue
        given = Input(call.result, tuple(value.shape), value.dtype)
        rest = (*graph.calls[:i], *graph.calls[i + 1 :])
        changed = RandomGraph((*graph.inputs, given), rest, graph.outputs)
        yield _with(Case(changed, {**case.values, call.result: value}), changed)
    for i, call in enumerate(graph.calls):
        x = call.operands["x"]
        others = (*graph.calls[:i], *graph.calls[i + 1 :])
        rest = tuple(_replaced(other, call.result, x) for other in others)
        outputs = tuple(x if n == call.result else n for n in graph.outputs)
        yield _with(case, RandomGraph(graph.inputs, rest, outputs))


def _fewer_elements(case: Case) -> Iterator[Case]:
    """One of the halves of all inputs along a dimension, or one element of it."""
    for dim in range(max((len(x.shape) for x in case.graph.inputs), default=0)):
        size = max(x.shape[dim] if len(x.shape) > dim else 0 for x in case.graph.inputs)
        parts = [(0, size // 2), (size // 2, size - size // 2)]
        if size <= _FEW:
            parts = [(i, 1) for i in range(size)]
        for start, length in parts if size > 1 else ():
            values = {
                x.name: case.values[x.name].narrow(dim, start, length).clone()
                if len(x.shape) > dim and x.shape[dim] == size
                else case.values[x.name]
                for x in case.graph.inputs
            }
            yield _with(Case(case.graph, values), case.graph)


def _with(case: Case, graph: RandomGraph) -> Case:
    """Returns a case of another graph without what that does not need."""
    graph = graph.without_dead_code()
    inputs = tuple(x._replace(shape=tuple(case.values[x.name].shape)) for x in graph.inputs)
    values = {x.name: case.values[x.name] for x in inputs}
    return Case(dataclasses.replace(graph, inputs=inputs), values)


def _simpler_constants(case: Case, fails: Callable[[Case], bool], end: float) -> Case:
    used = {call.operands[f] for call in case.graph.calls for f in "ck" if f in call.operands}
    for text in sorted(used):
        for simple in ("1.0", "2.0", "1e20", "1e30") if text in FLOATS else ("2", "3"):
            if simple == text or time.monotonic() > end:
                break
            calls = tuple(_replaced(call, text, simple) for call in case.graph.calls)
            changed = Case(dataclasses.replace(case.graph, calls=calls), case.values)
            if _is_valid(changed) and fails(changed):
                case = changed
                break
    return case


def _replaced(call: Call, text: str, by: str) -> Call:
    """Returns a call with another text in the place of operands of one text."""
    operands = {field: by if t == text else t for field, t in call.operands.items()}
    return dataclasses.replace(call, operands=operands)


def _simpler_values(case: Case, fails: Callable[[Case], bool], end: float) -> Case:
    """Ones in the place of elements that do not matter: the graph is not compiled again."""
    for given in case.graph.inputs:
        if given.size:
            continue
        for index in range(case.values[given.name].numel()):
            value = case.values[given.name].clone()
            flat = value.view(-1)
            if flat[index] == 1 or time.monotonic() > end:
                continue
            flat[index] = 1
            changed = Case(case.graph, {**case.values, given.name: value})
            if _is_valid(changed) and fails(changed):
                case = changed
    return case
