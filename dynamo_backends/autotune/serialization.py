"""A graph of Dynamo's as JSON, its tensors as torch saves them, and torch's settings.

This is how another process gets a graph. Nothing is pickled. Functions go by the names under which
they can be imported; a graph that calls anything else cannot be written.
"""

import contextlib
import importlib
import json
import operator
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn

from dynamo_backends import _torch_private as private
from dynamo_backends._torch_private import graph_serialization
from dynamo_backends.graph.precision import float32_matmul_precision
from dynamo_backends.workers.worker_process import child_environment


class GraphNotSerializableError(Exception):
    """Raised for a graph that another process could not read; the message says why."""


_GRAPH, _TENSORS, _OTHERS = "graph.json", "tensors.pt", "others.pt"


def write(folder: Path, captured: fx.GraphModule, values: list[Any]) -> None:
    """Writes a captured graph and its input values to files in a folder.

    Raises:
        NotWritable: It cannot be written.
    """
    names = {str(node.target) for node in captured.graph.find_nodes(op="get_attr")}
    attributes = {name: _attribute(captured, name) for name in sorted(names)}
    try:
        graph = graph_serialization.graph_to_text(captured.graph, _FUNCTIONS)
    except graph_serialization.UnserializableError as error:
        raise GraphNotSerializableError(f"the graph contains {error}") from error
    tensors = {str(i): v.detach() for i, v in enumerate(values) if isinstance(v, Tensor)}
    others = {str(i): v for i, v in enumerate(values) if not isinstance(v, Tensor)}
    grads = [i for i, v in enumerate(values) if isinstance(v, Tensor) and v.requires_grad]
    head = {"graph": graph, "values": others, "grads": grads, "inputs": len(values)}
    (folder / _GRAPH).write_text(json.dumps(head), encoding="utf-8")
    torch.save({"inputs": tensors, "attributes": attributes}, folder / _TENSORS)


def write_other_inputs(
    folder: Path, sets: Sequence[Sequence[Any]], static: Collection[int]
) -> None:
    """Writes input values of other sizes to the graph's folder, without weights."""
    kept = [{i: v for i, v in enumerate(values) if i not in static} for values in sets]
    torch.save(kept, folder / _OTHERS)


def read_other_inputs(folder: Path, values: Sequence[Any]) -> list[list[Any]]:
    """Reads the input values of other sizes from the graph's folder.

    Args:
        folder: The folder of the graph's files.
        values: The graph's own inputs.
    """
    if not (folder / _OTHERS).exists():
        return []
    sets = torch.load(folder / _OTHERS, weights_only=True)
    return [[given.get(i, v) for i, v in enumerate(values)] for given in sets]


def read(folder: Path) -> tuple[fx.GraphModule, list[Any]]:
    """Reads the graph and the input values that `write_graph` wrote."""
    head = json.loads((folder / _GRAPH).read_text(encoding="utf-8"))
    tensors = torch.load(folder / _TENSORS, weights_only=True)
    root = torch.nn.Module()
    for name, tensor in tensors["attributes"].items():
        root.register_buffer(name, tensor)
    graph = graph_serialization.graph_from_text(head["graph"], _FUNCTIONS)
    values = [
        tensors["inputs"].get(str(i), head["values"].get(str(i))) for i in range(head["inputs"])
    ]
    for i in head["grads"]:
        values[i].requires_grad_()
    return fx.GraphModule(root, graph), values


def _attribute(captured: fx.GraphModule, name: str) -> Tensor:
    value = getattr(captured, name, None)
    if not isinstance(value, Tensor):
        raise GraphNotSerializableError(
            f"the graph contains a subgraph or another attribute that is not a tensor, {name}"
        )
    return value.detach()


def _function_name(function: Callable[..., Any]) -> str:
    try:
        name = private.function_name(function)
        found = _function(name)
    except Exception:
        found, name = None, repr(function)
    if found is not function:
        raise GraphNotSerializableError(
            f"the graph calls {name}, which cannot be imported by that name"
        )
    return name


def _function(name: str) -> Any:
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:length]))
            return operator.attrgetter(".".join(parts[length:]))(module)
        except (ImportError, AttributeError):
            continue
    raise GraphNotSerializableError(f"there is no importable function {name}")


_FUNCTIONS = graph_serialization.FunctionTable(
    _function_name, _function, True, private.concretize_number
)


# The graph, as Dynamo captures it again.


def rebuild_with_parameters(
    graph: fx.GraphModule,
    values: Sequence[Any],
    places: Collection[int],
    sizes: Mapping[int, Sequence[int]] = MappingProxyType({}),
) -> fx.GraphModule:
    """Returns a module that Dynamo captures as the same graph: weights are parameters.

    Dynamo makes inputs in the order in which it comes upon them, which is the old one here, so that
    what is compiled of the graph has the same name in the disk cache.

    Args:
        graph: The graph.
        values: Its inputs.
        places: Which of them are weights.
        sizes: Which of them are sizes: of which other one, and of which dimension. They are no
            inputs of the result.
    """
    root, made = nn.Module(), fx.Graph()
    for name, buffer in graph.named_buffers():
        root.register_buffer(name, buffer)
    nodes: dict[fx.Node, fx.Node] = {}
    placeholders = graph.graph.find_nodes(op="placeholder")
    for i, (node, value) in enumerate(zip(placeholders, values, strict=True)):
        if i in places:
            weight = nn.Parameter(value.detach(), value.requires_grad)
            root.register_parameter(f"weight_{i}", weight)
            nodes[node] = made.get_attr(f"weight_{i}")
            continue
        if i in sizes:
            continue
        nodes[node] = made.placeholder(f"activation_{i}")
        if isinstance(value, Tensor):
            made.call_method("dim", (nodes[node],))  # Dynamo comes upon an argument when it is used
    for i, (tensor, dim) in sizes.items():
        nodes[placeholders[i]] = made.call_method("size", (nodes[placeholders[tensor]], dim))
    made.output(made.graph_copy(graph.graph, nodes))
    return fx.GraphModule(root, made)


# Settings.


def collect_settings(autocast: str) -> dict[str, Any]:
    """Returns torch's settings and the environment, for another process to apply.

    Args:
        autocast: See `cpu_autocast_dtype`, in the thread where the graph was captured.
    """
    return {
        "environment": child_environment(),
        "threads": torch.get_num_threads(),
        "precision": float32_matmul_precision(),
        "autocast": autocast,
        "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warns": torch.is_deterministic_algorithms_warn_only_enabled(),
    }


def apply_settings(settings: dict[str, Any]) -> None:
    """Applies another process's environment and torch settings, except autocast."""
    os.environ.clear()
    os.environ.update(settings["environment"])
    places = settings["environment"]["PYTHONPATH"].split(os.pathsep)
    sys.path += [place for place in places if place not in sys.path]
    torch.set_num_threads(settings["threads"])
    torch.set_float32_matmul_precision(settings["precision"])
    torch.set_default_dtype(getattr(torch, settings["dtype"]))
    torch.use_deterministic_algorithms(settings["deterministic"], warn_only=settings["warns"])


def cpu_autocast_dtype() -> str:
    """Returns the dtype of CPU autocast in this thread, as "bfloat16"; "" if it is off."""
    if not torch.is_autocast_enabled("cpu"):
        return ""
    return str(torch.get_autocast_dtype("cpu")).removeprefix("torch.")


def cpu_autocast(dtype: str) -> contextlib.AbstractContextManager[Any]:
    """Returns a context manager that sets CPU autocast to a dtype, without its cache.

    Nothing is kept for later calls: that memory belongs to all threads, and what was cast without
    gradients would be taken by calls with them.
    """
    if not dtype:  # as it is at the beginning of threads and processes
        return contextlib.nullcontext()
    return torch.autocast("cpu", getattr(torch, dtype), cache_enabled=False)
