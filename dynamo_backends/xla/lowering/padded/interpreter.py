"""Lowers graphs whose values are padded: as others, with each operator's rule around it."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
from torch import Tensor, fx

from dynamo_backends.graph.symbolic_sizes import SIZES, collect_varying_sizes
from dynamo_backends.interface.errors import NotPaddedError
from dynamo_backends.xla.lowering.context import LoweringOptions
from dynamo_backends.xla.lowering.interpreter import GraphLowering, conform
from dynamo_backends.xla.lowering.padded.call import Operand, PaddedCall
from dynamo_backends.xla.lowering.padded.extents import Extents, bound_of, extents_of, is_padded
from dynamo_backends.xla.lowering.padded.registry import find_padding_rule
from dynamo_backends.xla.lowering.padded.validity import Validity


class PaddedLowering(GraphLowering):
    """Lowers one graph that was specialised at bounds.

    Args:
        graph: Its last placeholder is for the real sizes.
        options: As for `GraphLowering`.
        places: Where among the real sizes each expression is.

    Attributes:
        outputs: The extents of the graph's outputs, once it was traced.
    """

    def __init__(self, graph: fx.Graph, options: LoweringOptions, places: Mapping[sympy.Expr, int]):
        super().__init__(graph, options)
        self._places = places
        self._extents: dict[fx.Node, Any] = {}
        self._replaced: Mapping[str, Any] = {}
        self._validity: Validity
        self.outputs: list[Extents] = []

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        """See `GraphLowering`."""
        self._validity = Validity(inputs[-1], self._places)
        for node in self._graph.find_nodes(op="placeholder"):
            self._extents[node] = extents_of(_sizes(node))
        results = super().__call__(inputs)
        outputs: Any = self._graph.output_node().args[0]
        self.outputs = [self._extents[a] for a in outputs if isinstance(a, fx.Node)]
        return results

    def _call(self, node: fx.Node) -> Any:
        if node.target is operator.getitem:
            source, index = node.args
            self._extents[node] = self._extents[source][index]  # type: ignore[index]
            return super()._call(node)
        if self._is_static(node):
            value = node.meta["val"]
            self._extents[node] = _static(value)
            return super()._call(node)
        row = find_padding_rule(node.target)
        if row is None:
            raise NotPaddedError(str(node.target), "it has no rule for padded inputs")
        call = PaddedCall(node, self._operand, self._lowered(node), self._validity)
        for name, value in call.values().items():
            if name not in row.shapes and collect_varying_sizes(value):
                raise call.refuse(f"its argument {name!r} is a dynamic size")
        result, self._extents[node] = row.rule(call)
        _check(call, self._extents[node])
        return conform(result, node.meta["val"])

    def _is_static(self, node: fx.Node) -> bool:
        """Returns whether nothing about a call varies."""
        if collect_varying_sizes((node.args, node.kwargs, node.meta.get(SIZES))):
            return False
        extents = [self._extents[n] for n in node.all_input_nodes]
        return not any(is_padded(e) for x in extents for e in x)

    def _operand(self, node: fx.Node) -> Operand:
        return Operand(self._extents[node], lambda: self._read_logical(node), self._validity)

    def _lowered(self, node: fx.Node) -> Callable[[Mapping[str, Any], Mapping[fx.Node, Any]], Any]:
        lower = super()._call

        def run(replaced: Mapping[str, Any], moved: Mapping[fx.Node, Any]) -> Any:
            before = self._values, self._logical
            self._values, self._logical = {**self._values, **moved}, {**self._logical, **moved}
            self._replaced = replaced
            try:
                return lower(node)
            finally:
                self._replaced = {}
                self._values, self._logical = before

        return run

    def _arguments(
        self, node: fx.Node, read: Callable[[fx.Node], Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any]]:
        args, kwargs = super()._arguments(node, read)
        if not self._replaced:
            return args, kwargs
        schema = node.target._schema.arguments  # type: ignore[union-attr]
        names = [argument.name for argument in schema]
        positional = [self._replaced.get(n, a) for n, a in zip(names, args, strict=False)]
        rest = {n: v for n, v in self._replaced.items() if n not in names[: len(args)]}
        return positional, {**kwargs, **rest}


def _sizes(node: fx.Node) -> tuple[int, ...]:
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return ()
    known = node.meta.get(SIZES)
    if known is None or tuple(known) != tuple(value.shape):
        raise NotPaddedError(node.name, "the sizes of this input are not known")
    return tuple(known)


def _static(value: Any) -> Any:
    if isinstance(value, Tensor):
        return extents_of(value.shape)
    if isinstance(value, list | tuple):
        return tuple(map(_static, value))
    return ()


def _check(call: PaddedCall, extents: Any) -> None:
    """Insists that a rule speaks of as many positions as the result has."""
    value = call.node.meta["val"]
    pairs = (
        [(value, extents)] if isinstance(value, Tensor) else list(zip(value, extents, strict=True))
    )
    for tensor, known in pairs:
        if isinstance(tensor, Tensor) and tuple(map(bound_of, known)) != tuple(tensor.shape):
            raise call.refuse(
                f"its padding rule returns {known}, but its result has shape {tuple(tensor.shape)}"
            )
