"""Asks ONNX Runtime itself whether it can run a call, and whether its result is eager's.

Each kind of call (operator, shapes, dtypes, other arguments) is compiled as a graph of its own and
run once, on inputs that contain what implementations tend to differ on. So a missing kernel, a
lowering that fails and one that means something else are found before a graph depends on them, and
each answer has a reason. Answers are remembered for the process.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import disable_current_modes
from dynamo_backends.backend import SUPPORTED, Support
from dynamo_backends.errors import CompileError, LoweringError
from dynamo_backends.graph.graph import Graph
from dynamo_backends.ort import rules
from dynamo_backends.ort.dtypes import is_supported
from dynamo_backends.ort.expansion import has_decomposition
from dynamo_backends.ort.session import plain
from dynamo_backends.toolkit.samples import sample, turns
from dynamo_backends.toolkit.trials import (
    COMPARED_ELEMENTS,
    EagerRefused,
    alone,
    elements,
    judge,
    tensors,
    used_results,
)
from dynamo_backends.verify import restore_rng, snapshot_rng

Compile = Callable[[Graph, Callable[[fx.Node], bool]], Any]


@dataclass(frozen=True)
class Verdict:
    """How a call is to be lowered.

    Attributes:
        support: Whether it can be.
        expanded: It has to be taken apart first.
    """

    support: Support
    expanded: bool = False


_verdicts: dict[str, Verdict] = {}
_lock = threading.RLock()


def verdict(node: fx.Node, compile_graph: Compile, settings: object) -> Verdict:
    """What is known about a call, after a trial if need be.

    Args:
        node: The call.
        compile_graph: Makes an executable of a graph.
        settings: What `compile_graph` depends on.
    """
    reason = _untriable(node)
    if reason is not None:
        return Verdict(Support(False, reason))
    key = f"{settings} {signature(node)}"
    with _lock:
        if key not in _verdicts:
            with disable_current_modes(), torch.no_grad():
                _verdicts[key] = _try(node, compile_graph)
        return _verdicts[key]


def signature(node: fx.Node) -> str:
    """What a verdict depends on: operator, arguments, and which results are used."""
    described = fx.map_arg((node.args, node.kwargs), lambda n: _Described(n))  # type: ignore
    return f"{node.target} {described} {used_results(node)}"


class _Described:
    def __init__(self, node: fx.Node):
        value = node.meta["val"]
        self._text = f"{value.dtype}{list(value.shape)}{value.stride()}{value.device}"

    def __repr__(self) -> str:
        return self._text


def _untriable(node: fx.Node) -> str | None:
    """Why a call cannot even be tried; None if it can."""
    if rules.why_not(node.target) is not None and not has_decomposition(node.target):
        return rules.why_not(node.target)
    for n in (*node.all_input_nodes, node):
        for value in tensors(n.meta.get("val")):
            if value.layout is not torch.strided:
                return f"ONNX has no {value.layout} tensors"
            if not is_supported(value.dtype):
                return f"ONNX Runtime does not compute with {value.dtype}"
            if any(not isinstance(s, int) for s in value.shape):
                return "a size depends on data"
    if any(not isinstance(n.meta.get("val"), Tensor) for n in node.all_input_nodes):
        return "an input is not a tensor"
    return None


def _try(node: fx.Node, compile_graph: Compile) -> Verdict:
    reason = rules.why_not(node.target)
    if reason is None:
        reason = _run(node, compile_graph, expanded=False)
        if reason is None:
            return Verdict(SUPPORTED)
    if has_decomposition(node.target) and _run(node, compile_graph, expanded=True) is None:
        return Verdict(SUPPORTED, expanded=True)
    return Verdict(Support(False, reason))


def _run(node: fx.Node, compile_graph: Compile, expanded: bool) -> str | None:
    """What is wrong with a call compiled alone; None if nothing is."""
    graph = alone(node)
    if not graph.outputs:
        return "it has no result that is a tensor"
    try:
        run = compile_graph(graph, lambda n: expanded and n.target is node.target).bind(())[0]
    except LoweringError as error:
        return error.reason
    except CompileError as error:
        return str(error)
    except Exception as error:  # of the exporter's passes; none may reach the user
        return f"its lowering to ONNX failed: {plain(error)}"
    values = [p.meta["val"] for p in graph.placeholders]
    if elements(node) > COMPARED_ELEMENTS:
        return None
    state = snapshot_rng()
    try:
        answers = (
            _compare(graph, run, sample(node.target, values, i)) for i in range(turns(values))
        )
        return next((wrong for wrong in answers if wrong is not None), None)
    finally:
        restore_rng(state)


def _compare(graph: Graph, run: Callable[..., Any], args: list[Any]) -> str | None:
    try:
        wrong = judge(graph, run, args)
    except EagerRefused:
        return None  # not inputs that this operator takes; the graph's own will be
    except Exception as error:
        return f"ONNX Runtime cannot run it: {plain(error)}"
    return None if wrong is None else f"in a trial ONNX Runtime's {wrong}"
