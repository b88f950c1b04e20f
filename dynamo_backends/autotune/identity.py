"""What a decision depends on: the graph, its inputs, the machine, and all versions."""

import functools
import hashlib
import json
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, fx

from dynamo_backends.runtime.cache import source_digest
from dynamo_backends.runtime.processor import processor_class, processor_family, processor_name

_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+")


def captured_fingerprint(captured: fx.GraphModule) -> str | None:
    """Returns a hash of what a graph of Dynamo's computes, equal in every process.

    Returns:
        None if the graph has something in it whose identity another process could not tell.
    """
    lines: list[str] = []
    _describe_graph(captured, lines)
    if any(_ADDRESS.search(line) for line in lines):
        return None
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _describe_graph(module: fx.GraphModule, lines: list[str]) -> None:
    number = {node: i for i, node in enumerate(module.graph.nodes)}
    for node in module.graph.nodes:
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: cast(Any, _Reference(number[n])))
        target = "" if node.op in ("placeholder", "output") else qualified(node.target)
        value = node.meta.get("example_value", node.meta.get("val"))
        if node.op == "get_attr":
            target, value = "", functools.reduce(getattr, str(node.target).split("."), module)
            if isinstance(value, fx.GraphModule):
                _describe_graph(value, lines)
                value = None
        lines.append(f"{node.op} {target} {arguments!r} {describe(value)}")


class _Reference:
    def __init__(self, number: int):
        self._number = number

    def __repr__(self) -> str:
        return f"%{self._number}"


def qualified(target: Callable[..., Any] | str) -> str:
    """A function's name with its module, as another process finds it; methods' names as they are.

    Names that torch re-exports are kept short: "torch.nn.functional.linear".
    """
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
        return str(target)
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    if name is None:
        return repr(target)
    return f"{getattr(target, '__module__', None) or 'torch'}.{name}"


def describe(value: Any) -> str:
    """Type, and for tensors dtype, shape, strides and device; symbols by their names."""
    if isinstance(value, Tensor):
        strides = list(value.stride()) if value.layout == torch.strided else value.layout
        grad = ",grad" if value.requires_grad else ""
        return f"{value.dtype}{list(value.shape)}{strides}{value.device}{grad}"
    if isinstance(value, list | tuple):
        return "(" + ",".join(map(describe, value)) + ")"
    return type(value).__name__


def environment(device_types: Sequence[str]) -> dict[str, Any]:
    """Returns the machine and the versions that all candidates share."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "dynamo_backends": source_digest(),
        "processor": processor_name(),
        "processor_class": processor_class(),
        "processor_family": processor_family(),
        "cores": _cores(),
        "threads": torch.get_num_threads(),
        "devices": [_device(kind) for kind in sorted(set(device_types))],
    }


def key_of(parts: Mapping[str, Any]) -> str:
    """Returns a hash of anything that JSON holds."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _device(kind: str) -> str:
    if kind == "cuda" and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return f"{torch.cuda.get_device_name()} sm_{major}{minor} CUDA {torch.version.cuda}"
    return kind
