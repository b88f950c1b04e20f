"""Graphs as text for people: one line per call, with dtypes, shapes and unusual strides."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import OpOverload
from dynamo_backends.graph.roles import Input


def format_graph(graph: fx.Graph, inputs: Sequence[Input] = ()) -> str:
    """A graph as text.

    Args:
        graph: The graph.
        inputs: Roles of its placeholders, if known.

    Examples:
        >>> print(format_graph(graph))
        graph(x: float32[3, 4])
          mul: float32[3, 4] = aten.mul.Tensor(x, 2)
          permute: float32[4, 3] strides (1, 4) = aten.permute.default(mul, [1, 0])
          return permute
    """
    known = {x.name: x for x in inputs}
    places = [n for n in graph.nodes if n.op == "placeholder"]
    lines = [_head(places, known)]
    lines += [f"  {_line(n)}" for n in graph.nodes if n.op not in ("placeholder", "output")]
    results = graph.output_node().args[0]
    single = not isinstance(results, list | tuple)
    shown = [results] if single else results
    lines.append(f"  return {', '.join(map(_argument, shown))}")  # type: ignore[arg-type]
    return "\n".join(lines)


def describe_value(value: Any) -> str:
    """Dtype, shape, and strides unless they are those of a contiguous tensor."""
    if isinstance(value, Tensor):
        shape = f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
        strides = "" if value.is_contiguous() else f" strides {tuple(value.stride())}"
        return shape + strides
    if isinstance(value, list | tuple):
        return f"({', '.join(map(describe_value, value))})"
    return type(value).__name__ if isinstance(value, torch.SymInt) else repr(value)


def _head(places: list[fx.Node], known: Mapping[str, "Input"]) -> str:
    shown = [f"{p.name}: {_input(p, known)}" for p in places]
    line = f"graph({', '.join(shown)})"
    return line if len(line) <= 100 else "graph(\n    " + ",\n    ".join(shown) + "\n  )"


def _input(place: fx.Node, known: Mapping[str, "Input"]) -> str:
    text = describe_value(_value(place))
    if place.name in known:
        x = known[place.name]
        text += f" {x.role.value}" + (" frozen" if x.frozen else "")
    return text


def _value(node: fx.Node) -> Any:
    return node.meta.get("val", node.meta.get("example_value"))


def _line(node: fx.Node) -> str:
    value = _value(node)
    kind = "" if value is None else f": {describe_value(value)}"
    return f"{node.name}{kind} = {_call(node)}"


def _call(node: fx.Node) -> str:
    if node.op == "get_attr":
        return f"self.{node.target}"
    if node.target is operator.getitem:
        return f"{_argument(node.args[0])}[{_argument(node.args[1])}]"
    args = [_argument(a) for a in node.args]
    args += [f"{name}={_argument(a)}" for name, a in node.kwargs.items()]
    if node.op == "call_method":
        return f"{args[0]}.{node.target}({', '.join(args[1:])})"
    return f"{_target(node)}({', '.join(args)})"


def _target(node: fx.Node) -> str:
    if isinstance(node.target, OpOverload | str):
        return str(node.target)
    return getattr(node.target, "__name__", str(node.target))


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_argument, value))}]"
    if isinstance(value, torch.device):
        return repr(str(value))
    return str(value) if isinstance(value, torch.dtype) else repr(value)
