"""Describes partitions, shapes and symbols of a graph for its report."""

import operator
from collections import Counter
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import OpOverload, size_bounds
from dynamo_backends.aot.inputs import value_text
from dynamo_backends.graph.graph import Graph, source_line
from dynamo_backends.graph.partition import PartitionedGraph, count_aten_calls
from dynamo_backends.graph.symbolic_sizes import SizeWithExpression, sizes_of
from dynamo_backends.interface.report import Fallback, GraphReport, InputReport, PartReport

UNCOMPILED = "the graph could not be compiled"


def describe_fallbacks(
    split: PartitionedGraph, by_design: Collection[str], silent: Collection[str]
) -> tuple[Fallback, ...]:
    """Groups calls that run in eager by operator and reason.

    Args:
        split: The partition.
        by_design: Reasons that are what the pipeline or the user wants.
        silent: Reasons that are no fallback at all.
    """
    grouped: dict[tuple[str, str], list[fx.Node]] = {}
    for node, reason in split.reasons.items():
        if node.target is not operator.getitem and reason not in silent:
            grouped.setdefault((_name(node), reason), []).append(node)
    return tuple(
        Fallback(op, reason, len(nodes), source_line(nodes[0]), reason in by_design)
        for (op, reason), nodes in grouped.items()
    )


def report_uncompiled(report: GraphReport, graph: fx.Graph) -> None:
    """Sets the report's fields to say that the whole graph runs in eager."""
    calls = [n for n in graph.nodes if n.op.startswith("call_")]
    split = PartitionedGraph((), dict.fromkeys(calls, UNCOMPILED))
    report.fallbacks = describe_fallbacks(split, (), ())
    report.ops_in_eager = sum(f.count for f in report.fallbacks)
    report.ops_on_backend = report.ops_on_inductor = report.blocks = 0
    report.parts = (PartReport("eager", report.ops_in_eager, Counter(map(_name, calls))),)


def describe_parts(split: PartitionedGraph, backend: str) -> tuple[PartReport, ...]:
    """Returns a `PartReport` for each part, in execution order."""
    return tuple(
        PartReport(
            backend if part.on_backend else "eager",
            count_aten_calls(part.graph.calls),
            Counter(_name(n) for n in part.graph.calls if n.target is not operator.getitem),
        )
        for part in split.parts
    )


def describe_shapes(
    graph: Graph, inputs: Sequence[InputReport], ranged: bool = False, padded: bool = False
) -> tuple[str, ...]:
    """Formats dtypes and shapes of activations, such as "x: float32[3, 4]".

    Args:
        graph: For concrete shapes.
        inputs: What is known of its inputs, one each.
        ranged: It was compiled for all sizes: "x: float32[s0, 4]".
        padded: It was compiled for sizes up to those of the graph: "x: float32[s0≤8, 4]".
    """
    return tuple(
        f"{known.name}: {_text(place, ranged, padded)}"
        for place, known in zip(graph.placeholders, inputs, strict=True)
        if known.role in ("activation", "tangent")
    )


def describe_symbols(graph: Graph) -> dict[str, str]:
    """Returns the value range of each symbolic size, such as "2 to 64"."""
    found: dict[str, str] = {}
    for place in graph.placeholders:
        value = place.meta.get("val")
        sizes = value.shape if isinstance(value, Tensor) else (value,)
        for size in sizes:
            if isinstance(size, torch.SymInt) and str(size).isidentifier():  # no expression
                least, most = size_bounds(size)
                found[str(size)] = f"from {least}" if most is None else f"{least} to {most}"
    return dict(sorted(found.items()))


def _text(place: fx.Node, ranged: bool, padded: bool) -> str:
    value, sizes = place.meta.get("val"), sizes_of(place)
    if not ranged or not any(isinstance(size, SizeWithExpression) for size in sizes):
        return value_text(value)
    shape = [_size_text(s, padded) for s in sizes]
    return f"{value_text(value).partition('[')[0]}[{', '.join(shape)}]"


def _size_text(size: int | None, padded: bool) -> str:
    if not isinstance(size, SizeWithExpression):
        return str(size)
    return f"{size.expression}≤{size}" if padded else str(size.expression)


def _name(node: fx.Node) -> str:
    if isinstance(node.target, OpOverload):
        return str(node.target)
    return str(getattr(node.target, "__name__", node.target))
