"""Takes the writes out of a graph: what is written to becomes another tensor.

As AOT Autograd's functionalization, but without tracing the graph again, which takes longer than
all else for a model with many parameters. Each kind of call that writes, or that is decomposed, is
traced once; all other calls are copied with the metadata that they have. Where a view is written
to, the trace is of the view and the call, and gives the new contents of all memory below.
"""

import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends._torch_private import FakeTensorMode, OpOverload
from dynamo_backends.aot.step.program.recording import WHAT_TO_DO, Recording
from dynamo_backends.graph.graph import Graph, Input, Role, eliminate_dead_calls, source_line
from dynamo_backends.graph.normalize import NORMALIZE, lift_constants
from dynamo_backends.graph.pass_sequence import PassSequence
from dynamo_backends.graph.shape_propagation import PROPAGATE, ShapeInference
from dynamo_backends.interface.errors import StepCaptureError


def functionalize(
    recording: Recording, decompositions: Any, pure: bool = False
) -> tuple[Graph, tuple[Tensor, ...]]:
    """Takes the writes out of a recorded step and brings it into normal form.

    Args:
        recording: From `capture.record`; its graph is changed.
        decompositions: Rules by operator.
        pure: Nothing but what the calls return is kept.

    Returns:
        A graph of the kind "step", whose outputs are first the new contents of inputs, in the order
        of these inputs (see `Input.updated_by`), then what the step returns or leaves behind; and
        one tensor for each input of role CONSTANT, which are the last ones.
    """
    if pure:
        count = 1 + max(recording.results, default=-1)
        recording.module.graph.output_node().args = (_outputs(recording.module)[:count],)
    recorded = lift_constants(recording.module)
    recording.module.recompile()
    _check_effects(recording.module.graph)
    mode = private.find_fake_mode(list(recording.fakes))
    assert mode is not None
    _set_values(recording, list(recorded.values()), mode)
    module, updates = Functionalization(recording.module, mode, decompositions)()
    _check_effects(module.graph)
    places = _order_updates(module, updates, recording)
    if pure:
        module.graph.output_node().args = (tuple(_outputs(module)[len(places) :]),)
        places = {}
    made = lift_constants(module)  # by decompositions
    _fake_constants(module, len(made), mode)
    constants = (*recorded.values(), *made.values())
    eliminate_dead_calls(module.graph)
    module.recompile()
    names = [p.name for p in module.graph.find_nodes(op="placeholder")]
    roles = [*recording.roles, *(Role.CONSTANT for _ in constants)]
    inputs = [
        Input(name, role, updated_by=places.get(i))
        for i, (name, role) in enumerate(zip(names, roles, strict=True))
    ]
    graph = Graph(module, "step", tuple(inputs))
    PassSequence((PROPAGATE,), given=NORMALIZE.ensures)(graph)
    return graph, constants


def _set_values(
    recording: Recording, constants: Sequence[Tensor], mode: private.FakeTensorMode
) -> None:
    with torch.no_grad():
        fakes = [f.detach() for f in recording.fakes]
    fakes += [mode.from_tensor(c, static_shapes=True) for c in constants]
    places = recording.module.graph.find_nodes(op="placeholder")
    for place, fake in zip(places, fakes, strict=True):
        place.meta["val"] = fake


def _check_effects(graph: fx.Graph) -> None:
    for node in graph.nodes:
        target = node.target
        if isinstance(target, private.HigherOrderOperator) or private.has_effects(target):
            inner = next((a for a in node.args if isinstance(a, private.OpOverload)), node.target)
            where = source_line(node)
            raise StepCaptureError(
                f"the step calls {inner}, which can raise an exception or have side effects inside "
                "the graph" + (f" (called at {where})" if where else "") + f". {WHAT_TO_DO}"
            )


def _fake_constants(module: fx.GraphModule, count: int, mode: private.FakeTensorMode) -> None:
    places = module.graph.find_nodes(op="placeholder")
    for place in places[len(places) - count :]:
        value = place.meta["val"]
        if not isinstance(value, private.FakeTensor):
            place.meta["val"] = mode.from_tensor(value, static_shapes=True)


def _outputs(module: fx.GraphModule) -> list[Any]:
    outputs: Any = module.graph.output_node().args[0]
    return list(outputs)


def _order_updates(
    module: fx.GraphModule, updates: dict[int, int], recording: Recording
) -> dict[int, int]:
    """Puts updates first, in the order of the inputs; returns the output of each input.

    An input that is "updated" by itself is not updated.
    """
    outputs = _outputs(module)
    places = module.graph.find_nodes(op="placeholder")
    rest = outputs[len(outputs) - len(_outputs(recording.module)) :]
    real = {
        place: outputs[out] for out, place in updates.items() if outputs[out] is not places[place]
    }
    ordered = sorted(real)
    module.graph.output_node().args = ((*(real[p] for p in ordered), *rest),)
    return {place: i for i, place in enumerate(ordered)}


@dataclass(eq=False)
class _Memory:
    """Memory that tensors share."""

    contents: Any
    is_input: bool = False


@dataclass(eq=False)
class _Tensor:
    """A tensor, or a list of views, of the graph that writes.

    Attributes:
        memory: Where it lies.
        value: Its node in the functional graph; a list of nodes for a list.
        contents: Those of the memory when `value` was computed.
        view: The call that makes it of `source`; None: it is all of the memory.
        source: What it is a view of.
    """

    memory: _Memory
    value: Any
    contents: Any
    view: fx.Node | None = None
    source: "_Tensor | None" = None

    def views(self) -> list[fx.Node]:
        """Returns the calls that make it of its memory."""
        if self.view is None or self.source is None:
            return []
        return [*self.source.views(), self.view]


class Functionalization:
    """Makes a functional graph of one that writes.

    Args:
        module: A straight line of ATen calls, with the metadata of all values; not changed.
        mode: The mode of its fake tensors.
        decompositions: Rules by operator, for the calls of the functional graph.

    Raises:
        StepCaptureError: The shape of an input is changed.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        mode: FakeTensorMode,
        decompositions: Mapping[Any, Callable[..., Any]],
    ):
        self._mode = mode
        self._rules = dict(decompositions)
        self._recorded = module
        self._module = private.lazy_graph_module(torch.nn.Module(), fx.Graph())
        self._graph = self._module.graph
        self._tensors: dict[fx.Node, Any] = {}
        self._traces: dict[Hashable, fx.GraphModule] = {}
        self._attributes: dict[int, fx.Node] = {}
        self._infer = ShapeInference()

    def __call__(self) -> tuple[fx.GraphModule, dict[int, int]]:
        """Functionalizes a graph, so that no call writes to memory.

        Returns:
            The functional graph, whose first outputs are new contents of inputs, and for each of
            these the position of the input.
        """
        graph = self._recorded.graph
        places = graph.find_nodes(op="placeholder")
        for node in graph.nodes:
            if node.op == "output":
                break
            self._add(node)
        memories = [self._tensors[place].memory for place in places]
        inputs = self._graph.find_nodes(op="placeholder")
        updated = [
            i for i, memory in enumerate(memories)
            if memory.contents is not inputs[i]
        ]  # fmt: skip
        results: Any = fx.map_arg(graph.output_node().args[0], self._value)
        self._graph.output((*(memories[i].contents for i in updated), *results))
        return self._module, dict(enumerate(updated))

    def _add(self, node: fx.Node) -> None:
        target: Any = node.target
        if node.op == "placeholder":
            place = self._graph.placeholder(node.name)
            place.meta = dict(node.meta)
            self._tensors[node] = _Tensor(_Memory(place, is_input=True), place, place)
        elif target is operator.getitem:
            self._tensors[node] = self._item(node)
        elif torch.Tag.inplace_view in target.tags or target.is_view:
            self._tensors[node] = self._view(node)
        elif target._schema.is_mutable:
            self._tensors[node] = self._write(node)
        else:
            self._tensors[node] = self._fresh(self._emit(node, node.target, self._value))

    def _value(self, node: fx.Node) -> Any:
        """Returns a value of the graph that writes, as it is now, in the functional graph."""
        tensor = self._tensors[node]
        return self._read(tensor) if isinstance(tensor, _Tensor) else tensor

    def _read(self, tensor: _Tensor) -> Any:
        contents = tensor.memory.contents
        if tensor.contents is not contents:
            is_again = tensor.value is not None
            tensor.contents = contents
            tensor.value = contents if tensor.view is None else self._view_of(tensor)
            if is_again and tensor.view is not None and isinstance(tensor.value, fx.Node):
                tensor.value.meta.pop("custom", None)  # it is no part of the backward pass any more
        return tensor.value

    def _view_of(self, tensor: _Tensor) -> Any:
        assert tensor.view is not None and tensor.source is not None
        source = self._read(tensor.source)
        if tensor.view.target is operator.getitem and isinstance(source, list | tuple):
            return source[tensor.view.args[1]]  # type: ignore[index]
        base = tensor.view.args[0]
        get = lambda n: source if n is base else self._value(n)  # noqa: E731
        return self._emit(tensor.view, _function_of(tensor.view), get)

    def _view(self, node: fx.Node) -> _Tensor:
        source = self._tensors[node.args[0]]  # type: ignore[index]
        if source.memory.is_input and _function_of(node) is not node.target and not source.view:
            raise StepCaptureError(
                f"the step changes the shape of an input in place ({node.target}). Use an "
                'out-of-place view, or pass fallback="split".'
            )
        tensor = _Tensor(source.memory, None, None, node, source)
        self._read(tensor)
        return tensor

    def _item(self, node: fx.Node) -> Any:
        source = self._tensors[node.args[0]]  # type: ignore[index]
        if isinstance(source, _Tensor):
            return self._view(node)
        if isinstance(source, list):
            return source[node.args[1]]  # type: ignore[index]
        return self._fresh(self._emit(node, node.target, self._value))

    def _fresh(self, value: Any) -> Any:
        """Wraps what a call returns in memory of its own."""
        if isinstance(value, list | tuple):
            return list(map(self._fresh, value))
        if isinstance(value, fx.Node) and isinstance(value.meta.get("val"), Tensor):
            return _Tensor(_Memory(value), value, value)
        return value

    def _write(self, node: fx.Node) -> Any:
        written, returned = _written(node)
        memories = list(dict.fromkeys(self._tensors[n].memory for n in written))
        results, contents = self._trace(node, node.target, self._value, written, memories)
        for memory, new in zip(memories, contents, strict=True):
            memory.contents = new
        tensors = [
            self._fresh(result) if source is None else self._tensors[source]
            for result, source in zip(results, returned, strict=True)
        ]
        return tensors[0] if len(tensors) == 1 else tensors

    def _emit(self, node: fx.Node, function: Any, get: Callable[[fx.Node], Any]) -> Any:
        """Puts a call that writes nothing into the functional graph."""
        if function in self._rules:
            results, _ = self._trace(node, function, get)
            return results[0] if len(results) == 1 else results
        args, kwargs = fx.map_arg((node.args, node.kwargs), get)
        new = self._graph.create_node("call_function", function, args, kwargs, node.name)
        new.meta = dict(node.meta)
        if any(_spec(get(n)) != _spec(n) for n in node.all_input_nodes):
            self._infer(new)  # a rule, or a call that writes nothing, gives other strides
        return new

    def _trace(
        self,
        node: fx.Node,
        function: Any,
        get: Callable[[fx.Node], Any],
        written: Sequence[fx.Node] = (),
        memories: Sequence[_Memory] = (),
    ) -> tuple[list[Any], list[Any]]:
        """Puts what torch makes of a call into the functional graph.

        Returns:
            What it returns, None for what it was given; and the new contents of the memories.
        """
        others = [n for n in node.all_input_nodes if n not in written]
        inputs = [*(memory.contents for memory in memories), *map(get, others)]
        lies_in = {n: (memories.index(t.memory), t.views()) for n in written
                   if isinstance(t := self._tensors[n], _Tensor)}  # fmt: skip
        call = _Call(node, function, others, lies_in)
        key = call.kind(), tuple(map(_spec, inputs))
        traced = self._traces.get(key)
        if traced is None:
            traced = self._traces[key] = self._make_trace(call, inputs)
        return self._insert(traced, inputs, node)

    def _make_trace(self, call: "_Call", inputs: Sequence[fx.Node]) -> fx.GraphModule:
        # Results of equal calls have one fake tensor; a trace tells its inputs apart by them.
        fakes = [n.meta["val"].detach() for n in inputs]
        with (
            torch.no_grad(),
            private.keeping_unused_draws(),
            private.without_autocast(),
            self._mode,
        ):
            traced = private.functional_trace(call, self._rules, fakes)
        traced.graph.eliminate_dead_code(is_impure_node=fx.Node.is_impure)
        return traced

    def _insert(
        self, traced: fx.GraphModule, inputs: Iterable[fx.Node], origin: fx.Node
    ) -> tuple[list[Any], list[Any]]:
        meta = {k: v for k, v in origin.meta.items() if k not in ("val", "tensor_meta")}
        remaining = iter(inputs)
        nodes: dict[fx.Node, Any] = {}
        for inner in traced.graph.nodes:
            if inner.op == "placeholder":
                nodes[inner] = next(remaining)
            elif inner.op == "get_attr":
                nodes[inner] = self._attribute(inner, getattr(traced, str(inner.target)))
            elif inner.op == "call_function":
                new = nodes[inner] = self._graph.node_copy(inner, nodes.__getitem__)
                new.meta = {**meta, "original_aten": origin.target}
                if "val" in inner.meta:  # not of assertions
                    new.meta["val"] = inner.meta["val"]
        results: Any = fx.map_arg(traced.graph.output_node().args[0], nodes.__getitem__)
        return results

    def _attribute(self, node: fx.Node, value: Any) -> fx.Node:
        """Returns the node of a tensor that is a constant of a decomposition."""
        known = self._attributes.get(id(value))
        if known is None:
            name = f"_constant_of_rule_{len(self._attributes)}"
            setattr(self._module, name, value)
            known = self._attributes[id(value)] = self._graph.get_attr(name)
            known.meta = dict(node.meta)
        return known


@dataclass(frozen=True)
class _Call:
    """A call as a function of tensors: of the memory that it writes to, and of its arguments.

    Attributes:
        node: The call.
        function: What is called in its place.
        others: The arguments that it only reads.
        written: For each of the others which memory it lies in, and the views that make it.
    """

    node: fx.Node
    function: Any
    others: Sequence[fx.Node]
    written: Mapping[fx.Node, tuple[int, list[fx.Node]]]

    def __call__(self, *tensors: Tensor) -> tuple[list[Any], list[Tensor]]:
        """Calls it; writes to the memory."""
        count = len(tensors) - len(self.others)
        memories = list(tensors[:count])
        values = dict(zip(self.others, tensors[count:], strict=True))
        for node, (number, views) in self.written.items():
            value = memories[number]
            for view in views:
                value = _function_of(view)(value, *view.args[1:], **view.kwargs)
            values[node] = value
        args, kwargs = fx.map_arg((self.node.args, self.node.kwargs), values.__getitem__)
        result = self.function(*args, **kwargs)
        count = len(self.function._schema.returns)
        results = [result] if count == 1 else list(result or ())
        returned = _written(self.node)[1] if self.written else [None] * count
        return [r if n is None else None for r, n in zip(results, returned, strict=True)], memories

    def kind(self) -> str:
        """Returns all that it depends on besides its tensors."""
        numbers = {n: i for i, n in enumerate(self.others)}

        def argument(value: Any) -> Any:
            if not isinstance(value, fx.Node):
                return value
            if value in numbers:
                return "input", numbers[value]
            memory, views = self.written[value]
            return "memory", memory, [(str(v.target), v.args[1:], v.kwargs) for v in views]

        given = fx.node.map_aggregate((self.node.args, self.node.kwargs), argument)
        return repr((str(self.function), given))


def _function_of(view: fx.Node) -> Any:
    """Returns the function that makes a view."""
    target: Any = view.target
    if target is operator.getitem or torch.Tag.inplace_view not in target.tags:
        return target
    packet = getattr(torch.ops.aten, target.overloadpacket.__name__.removesuffix("_"), None)
    function = getattr(packet, target._overloadname, None)
    if not isinstance(function, OpOverload) or not function.is_view:
        raise StepCaptureError(
            f"the step changes the storage of a tensor ({target}). Use an out-of-place operator, "
            'or pass fallback="split".'
        )
    return function


def _written(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node | None]]:
    """Returns the arguments that a call writes to; and for each result the argument that it is."""
    schema = node.target._schema  # type: ignore[union-attr]
    given: dict[str, Any] = {a.name: x for a, x in zip(schema.arguments, node.args, strict=False)}
    given |= node.kwargs
    by_alias = {
        tuple(a.alias_info.before_set): given.get(a.name)
        for a in schema.arguments
        if a.alias_info is not None and a.alias_info.is_write
    }
    written: list[fx.Node] = []
    fx.map_arg(list(by_alias.values()), written.append)
    returned = [
        by_alias[tuple(r.alias_info.before_set)] if r.alias_info is not None else None
        for r in schema.returns
    ]
    return list(dict.fromkeys(written)), returned


def _spec(node: Any) -> Hashable:
    """Returns the metadata of a value in a graph."""
    return metadata_of(node.meta.get("val") if isinstance(node, fx.Node) else node)


def metadata_of(value: Any) -> Hashable:
    """Dtype, device, shape, strides and layout of a tensor; of others the value itself."""
    if isinstance(value, list | tuple):
        return tuple(map(_spec, value))
    if not isinstance(value, Tensor):
        return value
    strides = value.stride() if value.layout is torch.strided else None
    bits = value.is_conj(), value.is_neg()
    return value.dtype, value.device, value.shape, strides, value.layout, bits
