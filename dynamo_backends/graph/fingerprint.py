"""Hashes what a graph computes; equal graphs have equal hashes in every process."""

import hashlib
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx

from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import infer_layout
from dynamo_backends.graph.symbolic_sizes import SIZES, FloatWithExpression, SizeWithExpression


def fingerprint(graph: Graph, ranged: bool = False) -> str:
    """Hashes a graph with SHA-256: operators, arguments, metadata and input roles.

    Names of nodes, source lines and the values of weights do not enter.

    Args:
        graph: With concrete or symbolic shapes.
        ranged: Sizes that come from symbolic shapes enter as expressions (see `sizes`), and strides
            as the order of dimensions in memory. So the same graph has the same hash in calls
            of different shapes.
    """
    number = {node: i for i, node in enumerate(graph.module.graph.nodes)}
    digest = hashlib.sha256(graph.kind.encode())
    for x in graph.inputs:
        digest.update(f"{x.role.value},{x.frozen};".encode())
        if x.updated_by is not None:
            digest.update(f"updated by {x.updated_by};".encode())
        if x.placed is not None:
            digest.update(f"placed {x.placed.placement};".encode())

    spell = _Spelling()

    def written(argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            return _Text(f"%{number[argument]}")
        if ranged and isinstance(argument, SizeWithExpression | FloatWithExpression):
            return _Text(spell(argument))
        return argument

    for node in graph.module.graph.nodes:
        arguments = fx.node.map_aggregate((node.args, node.kwargs), written)
        value = _describe_ranged(node, spell) if ranged else _describe(node.meta.get("val"))
        line = f"{node.op} {_target(node)} {arguments!r} {value}\n"
        digest.update(line.encode())
    return digest.hexdigest()


class _Spelling:
    """Expressions as text in which symbols are numbered in the order in which they appear."""

    def __init__(self) -> None:
        self._names: dict[sympy.Basic, sympy.Symbol] = {}
        self._known: dict[sympy.Expr, str] = {}

    def __call__(self, size: SizeWithExpression | FloatWithExpression) -> str:
        expression = size.expression
        if expression not in self._known:
            for symbol in sorted(expression.free_symbols, key=str):
                self._names.setdefault(symbol, sympy.Symbol(f"d{len(self._names)}"))
            self._known[expression] = str(expression.xreplace(self._names))
        return self._known[expression]


class _Text:
    def __init__(self, text: str):
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _target(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_function" else ""


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}{list(value.stride())}{value.device}"
    if isinstance(value, list | tuple):
        return "(" + ",".join(map(_describe, value)) + ")"
    return type(value).__name__


def _describe_ranged(node: fx.Node, spell: "_Spelling") -> str:
    value, sizes = node.meta.get("val"), node.meta.get(SIZES)
    if isinstance(value, list | tuple) and sizes is not None and len(sizes) == len(value):
        return "".join(_describe_tensor(v, s, spell) for v, s in zip(value, sizes, strict=True))
    return _describe_tensor(value, sizes, spell)


def _describe_tensor(value: Any, sizes: Sequence[int] | None, spell: "_Spelling") -> str:
    if not isinstance(value, torch.Tensor) or sizes is None or tuple(sizes) != tuple(value.shape):
        return _describe(value)
    shape = [spell(s) if isinstance(s, SizeWithExpression) else str(s) for s in sizes]
    return f"{value.dtype}{shape}{infer_layout(value)}{value.device}"
