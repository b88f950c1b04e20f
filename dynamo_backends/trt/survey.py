"""Asks TensorRT's own parser which calls of a graph it takes.

Lowerings that mean something else than torch does are left out first (`meaning`). Then the graph is
lowered to ONNX whole and shown to the parser. Calls that it complains of are taken
apart by torch's decompositions if there are any, or else cut out, and it is asked again, until it
takes all that remains: one complaint may hide others.
"""

import operator
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx
import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import FakeTensorMode, disable_current_modes
from dynamo_backends.graph.call_arguments import collect_call_tensors
from dynamo_backends.graph.decomposition_tables import has_decomposition
from dynamo_backends.graph.fingerprint import fingerprint
from dynamo_backends.graph.graph import Graph, Input, Role
from dynamo_backends.graph.planned_decomposition import compile_decomposed
from dynamo_backends.interface.errors import CompileError, LoweringError
from dynamo_backends.interface.plan import Plan
from dynamo_backends.onnx import exporter_lowerings
from dynamo_backends.onnx.dtypes import source_call_name
from dynamo_backends.onnx.lowering import lower_to_onnx
from dynamo_backends.ort.compiler import compile_graph
from dynamo_backends.ort.session import SessionSettings
from dynamo_backends.ort.trial import find_verdict
from dynamo_backends.runtime.cache import LRU
from dynamo_backends.runtime.verdicts import TrialVerdict
from dynamo_backends.trt import vendor
from dynamo_backends.trt.device import NAMES, driver
from dynamo_backends.trt.engine_builder import (
    Settings,
    error_text,
    new_network,
    placeholder_weights,
    serialize,
)
from dynamo_backends.trt.runtime import owned_weights
from dynamo_backends.verify.trials.call_trials import add_getitem_nodes, why_untriable

_CPU = SessionSettings(providers=(("CPUExecutionProvider", ()),), threads=1)

# ONNX Runtime has few kernels for these on the CPU; a lowering is the same for all of them.
_TRIED_AS = {torch.float16: torch.float32, torch.bfloat16: torch.float32}

_JUDGED = "in a trial "


# TensorRT's parser says what it takes, not whether a lowering is right. That is tried with ONNX
# Runtime, on the CPU, where a trial takes milliseconds (see `ort.trial`): one call alone, on
# awkward inputs, judged against eager. What ONNX Runtime has no kernel for on the CPU stays
# unjudged.
def known_verdict(node: fx.Node) -> TrialVerdict | None:
    """Returns the verdict on a call if no parser is needed; None if it is open.

    Args:
        node: A call whose inputs are tensors of static shapes.
    """
    found = find_verdict(_twin(node), lambda graph: compile_graph(graph, _CPU), _CPU, keep=False)
    if found.as_support.yes or found.as_support.reason.startswith(_JUDGED):
        return found
    return None


def _twin(node: fx.Node) -> fx.Node:
    """Returns the same call on CPU tensors, in a graph of its own."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    mode = FakeTensorMode()
    for source in node.all_input_nodes:
        copies[source] = graph.placeholder(source.name)
        copies[source].meta = {"val": _moved(source.meta["val"], mode)}
    copy = graph.node_copy(node, copies.__getitem__)
    copy.args = fx.node.map_aggregate(copy.args, _replaced)
    copy.kwargs = fx.node.map_aggregate(copy.kwargs, _replaced)
    copy.meta = {"val": _moved(node.meta["val"], mode)}
    graph.output(tuple(add_getitem_nodes(copy, node)))
    return copy


def _moved(value: Any, mode: FakeTensorMode) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_moved(v, mode) for v in value)
    if not isinstance(value, Tensor):
        return value
    dtype = _TRIED_AS.get(value.dtype, value.dtype)
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=dtype)


def _replaced(argument: Any) -> Any:
    if isinstance(argument, torch.device):
        return torch.device("cpu")
    return _TRIED_AS.get(argument, argument) if isinstance(argument, torch.dtype) else argument


_ROUNDS = 24
_REMEMBERED = 64


@dataclass
class Survey:
    """What TensorRT's parser says about each call of a graph: taken, refused, decomposed.

    Attributes:
        refused: Why calls are not taken.
        decomposed: Calls that are decomposed before they are lowered.
        whole: Why these are not taken whole.
    """

    refused: dict[str, str] = field(default_factory=dict)
    decomposed: set[str] = field(default_factory=set)
    whole: dict[str, str] = field(default_factory=dict)


class Surveys:
    """A cache of partition plans from TensorRT's parser, by graph and settings."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._known: LRU[str, tuple[dict[int, str], set[int]]] = LRU(_REMEMBERED)

    def __call__(self, graph: Graph, settings: Settings) -> Plan:
        """Returns what becomes of the calls of a graph with static shapes."""
        names = [node.name for node in graph.calls]
        key = f"{fingerprint(graph, ranged=True)} {settings.key()}"
        with self._lock:
            known = self._known.get(key)
            if known is None:
                with disable_current_modes():
                    found = survey(graph, settings)
                place = {name: i for i, name in enumerate(names)}
                refused = {place[name]: reason for name, reason in found.refused.items()}
                known = refused, {place[name] for name in found.decomposed}
                self._known.put(key, known)
            reasons, decomposed = known
        return Plan({names[i]: r for i, r in reasons.items()}, {names[i] for i in decomposed})


def survey(graph: Graph, settings: Settings) -> Survey:
    """Asks about every call of a graph with static shapes."""
    found = Survey()
    for node in graph.calls:
        reason = _untold(node)
        if reason is not None:
            _note(found, node, reason)
        elif node.target is not operator.getitem:
            _try(found, node)
    by_name = {node.name: node for node in graph.calls}
    for _ in range(_ROUNDS):
        part = _remaining(graph, found.refused)
        if not part.outputs:
            return found
        complaints = _ask(part, found, settings)
        if not complaints:
            return found
        for name, reason in complaints.items():
            _note(found, by_name[name], reason)
    for node in _remaining(graph, found.refused).calls:
        found.refused[node.name] = "TensorRT's parser does not support the graph that contains it"
    return found


def _untold(node: fx.Node) -> str | None:
    """Returns why the parser need not be asked about a call; None if it has to be."""
    if node.target is operator.getitem:
        return None
    for value in collect_call_tensors(node):
        if value.dtype not in NAMES:
            return f"TensorRT does not compute with {value.dtype}"
    return why_untriable(node, "TensorRT") or exporter_lowerings.why_call_not_lowered(node)


def _try(found: Survey, node: fx.Node) -> None:
    """Leaves out a lowering that means something else than the call."""
    judged = known_verdict(node)
    if judged is not None and judged.decomposed:
        found.decomposed.add(node.name)
        found.whole[node.name] = "its lowering to ONNX is wrong"
    elif judged is not None and not judged.as_support:
        found.refused[node.name] = judged.as_support.reason


def _note(found: Survey, node: fx.Node, reason: str) -> None:
    """Takes a call apart that the parser complains of, or if that is no way, refuses it."""
    if node.name not in found.decomposed and _can_decompose(node):
        found.decomposed.add(node.name)
        found.whole[node.name] = reason
        return
    found.decomposed.discard(node.name)
    found.refused[node.name] = found.whole.get(node.name, reason)


def _can_decompose(node: fx.Node) -> bool:
    plain = why_untriable(node, "") is None and all(
        t.dtype in NAMES for t in collect_call_tensors(node)
    )
    return plain and has_decomposition(node.target)


def _ask(part: Graph, found: Survey, settings: Settings) -> Mapping[str, str]:
    """Returns what is wrong with the calls of a part, by their names; empty if nothing is."""
    try:
        lowered = compile_decomposed(
            part, found.decomposed, exporter_lowerings.nested_decompositions(), lower_to_onnx
        )
    except LoweringError as error:
        return {error.node_name: error.reason}
    except CompileError as error:
        return {node.name: str(error) for node in part.calls}
    return _parse(serialize(lowered.model), part, settings)


def _parse(model: bytes, part: Graph, settings: Settings) -> Mapping[str, str]:
    trt, log = vendor.tensorrt(), vendor.logger()
    with driver().stream(settings.device), placeholder_weights(model) as path:
        builder = trt.Builder(log)
        network = new_network(builder, settings.options.strongly_typed)
        parser = trt.OnnxParser(network, log)
        if parser.supports_model_v2(model, path):
            return {}
        complaints = _complaints(parser, onnx.load_model_from_string(model).graph.node)
    calls = {node.name for node in part.calls}
    known = {name: reason for name, reason in complaints.items() if name in calls}
    return known or dict.fromkeys(calls, "TensorRT's parser does not support its graph")


def _complaints(parser: Any, nodes: Any) -> dict[str, str]:
    """Returns why calls are not taken: by errors, or because they are in no subgraph."""
    found: dict[str, str] = {}
    for i in range(parser.num_errors):
        error = parser.get_error(i)
        if 0 <= error.node() < len(nodes):
            call = source_call_name(nodes[error.node()].name)
            found.setdefault(call, f"TensorRT's parser says: {error_text(error)}")
    taken = {n for i in range(parser.num_subgraphs) for n in parser.get_subgraph_nodes(i)}
    for i, node in enumerate(nodes):
        if i not in taken:
            reason = f"TensorRT's parser does not support {node.op_type}"
            found.setdefault(source_call_name(node.name), reason)
    return found


def _remaining(graph: Graph, refused: Mapping[str, str]) -> Graph:
    """Returns the graph without some calls, whose results are inputs instead."""
    eager = {n for n in graph.calls if n.name in refused}
    eager |= {n for n in graph.calls if n.target is operator.getitem and n.args[0] in eager}
    kept = [n for n in graph.calls if n not in eager]
    roles = dict(zip(graph.placeholders, graph.inputs, strict=True))
    reads = dict.fromkeys(s for n in kept for s in n.all_input_nodes if s in roles or s in eager)
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in reads:
        copies[node] = part.placeholder(node.name)
        copies[node].meta = node.meta
    for node in kept:
        copies[node] = part.node_copy(node, copies.__getitem__)
    inside = set(kept)
    writes = [n for n in kept if any(user not in inside for user in n.users)]
    part.output(tuple(copies[n] for n in writes if isinstance(n.meta["val"], Tensor)))
    inputs = tuple(roles.get(n) or Input(n.name, Role.INTERMEDIATE) for n in reads)
    whole = Graph(fx.GraphModule(graph.module, part), graph.kind, inputs)
    owned = owned_weights(whole)
    return Graph(whole.module, whole.kind, tuple(
        Input(x.name, x.role, x.frozen and i in owned) for i, x in enumerate(whole.inputs)
    ))  # fmt: skip
