"""Whether the ONNX that a call is lowered to means what torch means by it.

TensorRT's parser says what it takes, not whether a lowering is right. That is tried with ONNX
Runtime, on the CPU, where a trial takes milliseconds (see `ort.trial`): one call alone, on awkward
inputs, judged against eager. What ONNX Runtime has no kernel for on the CPU stays unjudged.
"""

from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import FakeTensorMode
from dynamo_backends.ort.compiler import compile_graph
from dynamo_backends.ort.session import SessionSettings
from dynamo_backends.ort.trial import Verdict, verdict
from dynamo_backends.trials.trials import read_results

_CPU = SessionSettings(providers=(("CPUExecutionProvider", ()),), threads=1)

# ONNX Runtime has few kernels for these on the CPU; a lowering is the same for all of them.
_TRIED_AS = {torch.float16: torch.float32, torch.bfloat16: torch.float32}

_JUDGED = "in a trial "


def judge(node: fx.Node) -> Verdict | None:
    """How a call is to be lowered; None if that is open.

    Args:
        node: A call whose inputs are tensors of static shapes.
    """
    found = verdict(_twin(node), lambda graph: compile_graph(graph, _CPU), _CPU, keep=False)
    if found.support.yes or found.support.reason.startswith(_JUDGED):
        return found
    return None


def _twin(node: fx.Node) -> fx.Node:
    """The same call on CPU tensors, in a graph of its own."""
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
    graph.output(tuple(read_results(copy, node)))
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
