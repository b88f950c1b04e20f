"""Features of a graph: work by kind, sizes, and what surrounds the products.

Graphs are Dynamo's, of torch's functions, or functional ones, of ATen's operators. What is counted
is what the nodes' fake values say; sizes that are symbols count as they are in the call that is
compiled.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, fx
from torch.utils import _pytree as pytree

from dynamo_backends import _torch_private as private
from dynamo_backends.autotune.priors.kinds import KINDS, kind_of, name_of

_FEW = 4  # channels of a convolution that kernels treat in a way of their own
_WORK = ("convolution", "product", "attention")


class _Sums:
    """What the calls of a graph amount to.

    Attributes:
        calls: Of each kind.
        written: Bytes of results, of each kind.
        flops: Of each kind, and of kinds of convolutions.
        logarithms: Of products' sizes and convolutions' channels, weighted by FLOPs.
        batches: First dimensions of results.
        is_dynamic: A size is a symbol.
    """

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        self.flops: dict[str, float] = {}
        self.logarithms: dict[str, float] = {}
        self.batches: Counter[int] = Counter()
        self.is_dynamic = False

    def add(self, node: fx.Node) -> None:
        """Counts a call."""
        kind, results = kind_of(node.target), list(_tensors(node))
        self.calls[kind] += 1
        self.written[kind] += sum(map(_bytes, results))
        self.batches.update(_shape(v)[0] for v in results[:1] if v.dim() > 1)
        self.is_dynamic |= any(not isinstance(n, int) for v in results for n in v.shape)
        operands = list(_tensors((node.args, node.kwargs)))
        if results and len(operands) > 1:
            self._add_work(kind, name_of(node.target), operands, results[0])

    def _add_work(self, kind: str, name: str, operands: Sequence[Tensor], result: Tensor) -> None:
        if kind == "convolution":
            self._add_convolution(name, operands[0], operands[1], result)
        elif kind == "product":
            left, right = operands[1:3] if name in ("addmm", "baddbmm", "addmv") else operands[:2]
            flops = 2.0 * _count(result) * max(_shape(left)[-1:] or [1])
            if name in ("einsum", "tensordot"):
                flops = 2.0 * math.sqrt(_count(left) * _count(right) * _count(result))
            self._add_flops("product", flops)
            self._add_logarithm("product", flops, flops)
        elif kind == "attention":
            length = (_shape(operands[1])[-2:] or [1])[0]
            self._add_flops("attention", 4.0 * _count(operands[0]) * length)

    def _add_convolution(self, name: str, x: Tensor, weight: Tensor, result: Tensor) -> None:
        sizes, given = _shape(weight), _shape(x)
        if len(sizes) < 3 or not sizes[0]:
            return
        over = _count(x) if "transpose" in name else _count(result)
        flops = 2.0 * over * _count(weight) / sizes[0]
        self._add_flops("convolution", flops)
        channels = given[1] if len(given) == len(sizes) else sizes[1]
        if sizes[1] == 1 < channels:
            self._add_flops("depthwise", flops)
        elif sizes[1] < channels:
            self._add_flops("grouped", flops)
        elif sizes[1] <= _FEW:
            self._add_flops("few_channels", flops)
        if math.prod(sizes[2:]) == 1:
            self._add_flops("pointwise_convolution", flops)
        self._add_logarithm("channels", sizes[1], flops)

    def _add_flops(self, kind: str, flops: float) -> None:
        self.flops[kind] = self.flops.get(kind, 0.0) + flops

    def _add_logarithm(self, name: str, value: float, weight: float) -> None:
        self.logarithms[name] = self.logarithms.get(name, 0.0) + weight * _log(value)


def graph_features(graph: fx.GraphModule) -> dict[str, float]:
    """A graph in numbers.

    Shares lie between 0 and 1: of FLOPs those of convolutions, products and attention; of bytes
    written that of pointwise functions; of calls the others. Amounts are logarithms to base 2.

    Args:
        graph: Its nodes have fake values.
    """
    sums = _Sums()
    inputs = [t for node in graph.graph.find_nodes(op="placeholder") for t in _tensors(node)]
    for node in graph.graph.nodes:
        if node.op.startswith("call_"):
            sums.add(node)
    flops = sum(sums.flops.get(kind, 0.0) for kind in _WORK)
    written, calls = sums.written.total(), sums.calls.total()
    floating = [t.dtype.itemsize for t in inputs if t.is_floating_point()]
    return {
        "calls": _log(calls),
        "flops": _log(flops),
        "written": _log(written),
        "read": _log(sum(map(_bytes, inputs))),
        "intensity": _log(flops / max(written, 1)),
        "batch": _log(sums.batches.most_common(1)[0][0]) if sums.batches else 0.0,
        "bits": 8.0 * max(floating, default=4),
        "dynamic": float(sums.is_dynamic),
        "product_size": sums.logarithms.get("product", 0.0) / max(sums.flops.get("product", 0), 1),
        "channels": sums.logarithms.get("channels", 0.0) / max(sums.flops.get("convolution", 0), 1),
        **{f"{kind}_work": sums.flops.get(kind, 0.0) / max(flops, 1) for kind in (
            *_WORK, "depthwise", "grouped", "few_channels", "pointwise_convolution")},
        **{f"{kind}_calls": sums.calls[kind] / max(calls, 1) for kind in KINDS},
        "pointwise_written": sums.written["pointwise"] / max(written, 1),
    }  # fmt: skip


def _tensors(of: Any) -> Iterator[Tensor]:
    """The fake tensors of a node, or of the nodes in arguments."""
    if isinstance(of, fx.Node):
        value = of.meta.get("example_value", of.meta.get("val"))
        yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
        return
    for leaf in pytree.tree_leaves(of):
        if isinstance(leaf, fx.Node):
            yield from _tensors(leaf)


def _shape(tensor: Tensor) -> list[int]:
    return [int(private.concrete(n) or 0) for n in tensor.shape]


def _count(tensor: Tensor) -> int:
    return math.prod(_shape(tensor))


def _bytes(tensor: Tensor) -> int:
    return _count(tensor) * tensor.dtype.itemsize


def _log(number: float) -> float:
    return math.log2(max(number, 1.0))
