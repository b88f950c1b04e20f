"""A hash of what a graph computes, equal in every process."""

import hashlib
from typing import Any, cast

import torch
from torch import fx

from dynamo_backends.graph.graph import Graph


def fingerprint(graph: Graph) -> str:
    """SHA-256 over operators, their arguments, shapes, strides, dtypes, devices and input roles.

    Names of nodes, source lines and the values of weights do not enter.
    """
    number = {node: i for i, node in enumerate(graph.module.graph.nodes)}
    digest = hashlib.sha256(graph.kind.encode())
    for x in graph.inputs:
        digest.update(f"{x.role.value},{x.frozen};".encode())
    for node in graph.module.graph.nodes:
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: cast(Any, _Reference(number[n])))
        line = f"{node.op} {_target(node)} {arguments!r} {_describe(node.meta.get('val'))}\n"
        digest.update(line.encode())
    return digest.hexdigest()


class _Reference:
    def __init__(self, number: int):
        self._number = number

    def __repr__(self) -> str:
        return f"%{self._number}"


def _target(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_function" else ""


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}{list(value.stride())}{value.device}"
    if isinstance(value, list | tuple):
        return "(" + ",".join(map(_describe, value)) + ")"
    return type(value).__name__
