"""Turns an ATen graph into TorchScript's intermediate representation, call by call.

The graph is built, not traced: no operator runs, the data of inputs does not matter, and every call
is checked to be resolved to exactly the overload that it is a call of.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import OpOverload, jit
from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface.errors import LoweringError

_MEMORY_FORMATS = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}


class _Refused(Exception):
    """A call that cannot be expressed; the message says why."""


def lower(graph: Graph) -> Any:
    """A TorchScript graph from all inputs of a graph, in order, to the tuple of its outputs.

    Raises:
        LoweringError: A call cannot be expressed.
    """
    builder = _Builder()
    for place in graph.placeholders:
        builder.input(place)
    for node in graph.calls:
        try:
            builder.call(node)
        except _Refused as refused:
            raise LoweringError(node.name, str(node.target), str(refused)) from refused
    return builder.finish(graph.outputs)


def why_not(node: fx.Node) -> str | None:
    """Returns why a call cannot be expressed in TorchScript; None if it can."""
    builder = _Builder()
    try:
        for source in node.all_input_nodes:
            builder.input(source)
            for each in source.all_input_nodes:  # a product may look through a transpose
                if isinstance(each.meta.get("val"), Tensor):
                    builder.input(each)
        builder.call(node)
    except _Refused as refused:
        return str(refused)
    return None


class _Builder:
    def __init__(self) -> None:
        self.graph = jit.Graph()
        self._values: dict[fx.Node, Any] = {}  # a value, or a list of them
        self._first_only: set[fx.Node] = set()

    def input(self, node: fx.Node) -> None:
        """Adds an input for a node's value."""
        kind = jit.IntType if isinstance(node.meta.get("val"), int) else jit.TensorType
        if kind is jit.TensorType and not isinstance(node.meta.get("val"), Tensor):
            raise _Refused("an input is not a tensor")
        if node in self._values:
            return
        value = self.graph.addInput(node.name)
        value.setType(kind.get())
        self._values[node] = value

    def finish(self, outputs: Sequence[Any]) -> Any:
        """Returns the graph, returning the tuple of outputs."""
        values = [self._values[x] if isinstance(x, fx.Node) else x for x in outputs]
        result = self._create("prim::TupleConstruct", values, 1)
        kinds = [v.type() for v in values]
        result.output().setType(jit.TupleType(kinds))
        self.graph.registerOutput(result.output())
        return self.graph

    def call(self, node: fx.Node) -> None:
        """Adds a call to the script's graph."""
        if node.target is operator.getitem:
            source, index = node.args
            results = self._values[source]  # type: ignore[index]
            self._values[node] = results if source in self._first_only else results[index]
            return
        if not isinstance(node.target, OpOverload):
            raise _Refused("it is not an ATen operator")
        spelled = replacement_call(node)
        if spelled is None:
            self._values[node] = self._emit(node.target, node.args, node.kwargs, node)
            return
        self._values[node] = self._emit(spelled.op, spelled.args, {}, node)
        if spelled.first:
            self._first_only.add(node)

    def _emit(
        self, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], node: fx.Node
    ) -> Any:
        schema = op._schema
        given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | dict(kwargs)
        values = []
        wrapped = False
        for formal in schema.arguments:
            actual = given.get(formal.name, formal.default_value)
            wrapped |= isinstance(formal.type, jit.TensorType) and isinstance(actual, int | float)
            if isinstance(actual, bool) and _is_number(formal.type):
                actual = _without_bool(actual, given)
            values.append(self._argument(actual, formal.type, formal.N))  # type: ignore[attr-defined]
        call = self._create(schema.name, values, len(schema.returns))
        for output, promised in zip(call.outputs(), schema.returns, strict=True):
            output.setType(promised.type)
        found = call.schema().partition("(")[0]
        wanted = schema.name + ("." if schema.overload_name else "") + schema.overload_name
        # A number in a tensor's place means the same as in the overload that takes a number.
        if found != wanted and not (wrapped and found.partition(".")[0] == schema.name):
            raise _Refused(f"TorchScript resolves it to {found or 'nothing'}")
        return self._results(call, schema.returns, node)

    def _results(self, call: Any, returns: Sequence[Any], node: fx.Node) -> Any:
        if any(isinstance(r.type, jit.ListType) for r in returns):
            if len(returns) != 1:
                raise _Refused("it returns lists among several results")
            unpack = self._create("prim::ListUnpack", [call.output()], len(node.meta["val"]))
            for output in unpack.outputs():
                output.setType(jit.TensorType.get())
            return list(unpack.outputs())
        if not returns or not all(isinstance(r.type, jit.TensorType) for r in returns):
            raise _Refused("its result is not a tensor")
        outputs = list(call.outputs())
        return outputs[0] if len(outputs) == 1 else outputs

    def _argument(self, value: Any, kind: Any, length: int | None = None) -> Any:
        if isinstance(kind, jit.OptionalType) and value is not None:
            return self._argument(value, kind.getElementType(), length)
        if isinstance(value, fx.Node):
            return self._values[value]
        if isinstance(kind, jit.ListType) and value is not None:
            return self._list(value, kind, length)
        return self._constant(_scalar(value, kind))

    def _list(self, value: Any, kind: Any, length: int | None) -> Any:
        if not isinstance(value, list | tuple):
            value = [value] * (length or 1)
        element = kind.getElementType()
        if value and all(isinstance(v, int | float) for v in value):
            return self._constant([_scalar(v, element) for v in value])
        values = [self._argument(v, element) for v in value]
        made = self._create("prim::ListConstruct", values, 1)
        made.output().setType(kind)
        return made.output()

    def _constant(self, value: Any) -> Any:
        try:
            return self.graph.insertConstant(value)
        except (TypeError, RuntimeError) as error:
            raise _Refused(f"TorchScript does not support the constant {value!r}") from error

    def _create(self, kind: str, values: Sequence[Any], outputs: int) -> Any:
        made = self.graph.create(kind, list(values), outputs)
        self.graph.insertNode(made)
        return made


def _is_number(kind: Any) -> bool:
    return str(kind) in ("number", "Optional[number]")


def _scalar(value: Any, kind: Any) -> Any:
    if isinstance(kind, jit.FloatType) and isinstance(value, int):
        return float(value)
    return _MEMORY_FORMATS.get(value, value) if isinstance(value, torch.memory_format) else value


def _without_bool(value: bool, given: Mapping[str, Any]) -> int:
    """A bool as the number that TorchScript wants, where the result's dtype does not change."""
    first = next(iter(given.values()), None)
    meta = first.meta["val"] if isinstance(first, fx.Node) else None
    if given.get("dtype") is None and (not isinstance(meta, Tensor) or meta.dtype == torch.bool):
        raise _Refused("TorchScript does not accept a bool as a scalar")
    return int(value)


aten = torch.ops.aten


@dataclass(frozen=True)
class ReplacementCall:
    """The equivalent call with which TorchScript's passes know a call.

    Attributes:
        op: The operator.
        args: Its arguments, nodes of the graph among them.
        first: It has one result, which is the first of the original's several.
    """

    op: OpOverload
    args: tuple[Any, ...]
    first: bool = False


Rule = Callable[[fx.Node], ReplacementCall | None]
_RULES: dict[OpOverload, Rule] = {}


def replacement_call(node: fx.Node) -> ReplacementCall | None:
    """Returns the equivalent call that TorchScript's passes know; None: keep it."""
    rule = _RULES.get(node.target)  # type: ignore[call-overload]
    return None if rule is None else rule(node)


def _spells(*ops: OpOverload) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(ops, rule))
        return rule

    return add


@_spells(aten.convolution.default)
def _convolution(node: fx.Node) -> ReplacementCall | None:
    x, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
    known = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
    dims = x.meta["val"].ndim - 2  # type: ignore[union-attr]
    if transposed or dims not in (1, 2, 3):
        return None
    return ReplacementCall(known[dims - 1], (x, weight, bias, stride, padding, dilation, groups))


@_spells(aten.addmm.default)
def _linear(node: fx.Node) -> ReplacementCall | None:
    bias, x, right = node.args
    weight = _transposed(right)
    if node.kwargs or weight is None or bias.meta["val"].ndim != 1:  # type: ignore[union-attr]
        return None
    if bias.meta["val"].shape[0] != weight.meta["val"].shape[0]:  # type: ignore[union-attr]
        return None
    return ReplacementCall(aten.linear.default, (x, weight, bias))


@_spells(aten.mm.default)
def _linear_without_bias(node: fx.Node) -> ReplacementCall | None:
    x, right = node.args
    weight = _transposed(right)
    return None if weight is None else ReplacementCall(aten.linear.default, (x, weight))


def _transposed(node: Any) -> fx.Node | None:
    """Returns what a node is the matrix transpose of."""
    if node.target is aten.t.default:
        return node.args[0]
    if node.target is aten.permute.default and [d % 2 for d in node.args[1]] == [1, 0]:
        return node.args[0]
    return None


@_spells(aten.native_layer_norm.default)
def _layer_norm(node: fx.Node) -> ReplacementCall | None:
    return ReplacementCall(aten.layer_norm.default, node.args, first=True) if _first(node) else None


@_spells(aten._native_batch_norm_legit_no_training.default)
def _batch_norm(node: fx.Node) -> ReplacementCall | None:
    if not _first(node):
        return None
    *tensors, momentum, eps = node.args
    args = (*tensors, False, momentum, eps, False)
    return ReplacementCall(aten.batch_norm.default, args, first=True)


@_spells(aten.max_pool2d_with_indices.default)
def _max_pool2d(node: fx.Node) -> ReplacementCall | None:
    return ReplacementCall(aten.max_pool2d.default, node.args, first=True) if _first(node) else None


@_spells(aten._softmax.default)
def _softmax(node: fx.Node) -> ReplacementCall | None:
    return None if node.args[2] else ReplacementCall(aten.softmax.int, node.args[:2])


@_spells(aten._log_softmax.default)
def _log_softmax(node: fx.Node) -> ReplacementCall | None:
    return None if node.args[2] else ReplacementCall(aten.log_softmax.int, node.args[:2])


@_spells(aten.view.default, aten._unsafe_view.default)
def _reshape(node: fx.Node) -> ReplacementCall:
    # Passes may change strides, and a view that was possible would not be any more.
    return ReplacementCall(aten.reshape.default, node.args)


def _first(node: fx.Node) -> bool:
    """Returns whether only the first of several results is used."""
    return all(u.target is operator.getitem and u.args[1] == 0 for u in node.users)
