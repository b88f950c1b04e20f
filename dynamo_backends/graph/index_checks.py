"""Checks of positions and assertions that compiled code does not make.

What follows from the inputs by a few small calls is checked before a call (see
`PositionChecks.before`). What is computed on the way gives one more output, which says that
something is out of range, and compiled code reads position 0 instead. Either way the call is then
repeated in eager.
"""

import itertools
import logging
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import disable_current_modes
from dynamo_backends.graph.call_arguments import is_pointwise
from dynamo_backends.graph.graph import Graph, Role, eliminate_dead_calls
from dynamo_backends.graph.index_arguments import IndexArgument, find_index_arguments
from dynamo_backends.graph.random_draws import is_random
from dynamo_backends.graph.shape_propagation import ShapeInference
from dynamo_backends.graph.value_ranges import (
    IntegerRangeAnalysis,
    Range,
    is_never_above,
    range_of_constant,
    to_bound,
)

log = logging.getLogger("dynamo_backends")

aten = torch.ops.aten

ASSERTIONS = frozenset({aten._assert_async.default, aten._assert_async.msg})

_MOST_CALLS = 24
_MOST_ELEMENTS = 1 << 16
"""What may be computed in eager before a call, at most."""

_SMALL = frozenset(
    {
        aten.alias.default, aten.view.default, aten._unsafe_view.default, aten.expand.default,
        aten.permute.default, aten.t.default, aten.transpose.int, aten.slice.Tensor,
        aten.select.int, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
        aten.unsqueeze.default, aten.clone.default, aten.flip.default, aten.repeat.default,
        aten._to_copy.default, aten.cat.default, aten.stack.default, aten.arange.default,
        aten.arange.start, aten.arange.start_step, aten.full.default, aten.full_like.default,
        aten.scalar_tensor.default, aten.zeros.default, aten.ones.default, aten.zeros_like.default,
        aten.ones_like.default, aten.cumsum.default, aten.sum.default, aten.sum.dim_IntList,
        aten.any.default, aten.any.dim, aten.any.dims, aten.all.default, aten.all.dim,
        aten.all.dims, aten.max.default,
        aten.min.default, aten.amax.default, aten.amin.default, aten.sym_size.int,
        aten.constant_pad_nd.default, aten.detach.default, aten.lift_fresh_copy.default,
    }
)  # fmt: skip
"""Calls besides pointwise ones that are cheap in eager."""


@dataclass(frozen=True)
class _Requirement:
    """Positions that are not known to be in range.

    Attributes:
        position: Them.
        low: The least that eager takes.
    """

    position: IndexArgument
    low: Any

    @property
    def node(self) -> fx.Node:
        return self.position.node


@dataclass
class ForwardValueRanges:
    """Integer ranges proven or checked in a forward graph, reused for its backward graph.

    Attributes:
        ranges: Ranges of the integers in tensors, by the names of nodes.
    """

    ranges: dict[str, Range] = field(default_factory=dict)


@dataclass(frozen=True)
class InputCheck:
    """A check of index ranges and assertions that runs in eager before a call.

    Attributes:
        reads: Positions of the inputs that it reads.
        module: Computes from them, for each check in turn, the tensor, its least and its largest
            allowed value; an assertion has none.
        stable: Of which checks the tensor is a weight, which seldom changes: checked once for
            each version.
        constants: What it reads besides: the graph's own.
    """

    reads: tuple[int, ...]
    module: fx.GraphModule
    stable: tuple[bool, ...]
    constants: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class IndexCheckedGraph:
    """A graph with index checks added: what is checked before a call, and the flag output.

    Attributes:
        graph: Compiled in the place of the one that was given.
        before: What is checked before a call; None: nothing.
        flag: Position of the output that says if something is out of range; None: there is none.
    """

    graph: Graph
    before: InputCheck | None = None
    flag: int | None = None


def with_index_checks(
    graph: Graph, constants: Sequence[Tensor] = (), facts: ForwardValueRanges | None = None
) -> IndexCheckedGraph:
    """Copies a graph and adds checks of indices and assertions that are not proven.

    Args:
        graph: In normal form; not changed.
        constants: Values of its last placeholders.
        facts: Of a forward graph: filled in; of a backward graph: what its forward graph checked.
    """
    if graph.kind != "forward" and not any(
        n.target in ASSERTIONS or find_index_arguments(n) for n in graph.calls
    ):
        return IndexCheckedGraph(graph)
    return _Checker(graph, constants, ForwardValueRanges() if facts is None else facts).checks()


class _Checker:
    def __init__(self, graph: Graph, constants: Sequence[Tensor], facts: ForwardValueRanges):
        self._graph = graph.copy()
        self._facts = facts
        places = self._graph.placeholders
        known: dict[fx.Node, Range] = {}
        if graph.kind == "backward":
            nodes = self._graph.module.graph.nodes
            known = {n: facts.ranges[n.name] for n in nodes if n.name in facts.ranges}
        self._constants = dict(zip(places[len(places) - len(constants) :], constants, strict=True))
        for place, value in self._constants.items():
            found = range_of_constant(value)
            known.pop(place, None)  # names of constants are each graph's own
            if found is not None:
                known[place] = found
        self._ranges = IntegerRangeAnalysis(known)
        self._infer = ShapeInference()

    def checks(self) -> IndexCheckedGraph:
        graph = self._graph
        before: list[_Requirement | fx.Node] = []
        inside: list[_Requirement] = []
        for requirement in self._unproven():
            if self._is_early(requirement):
                before.append(requirement)
            else:
                inside.append(requirement)
        asserted = [n for n in graph.calls if n.target in ASSERTIONS]
        late: list[fx.Node] = []
        for call in asserted:
            condition: Any = call.args[0]
            if self._ranges.range_of(condition) == (1, 1):
                continue
            (before if self._is_small([condition]) else late).append(condition)
        if graph.kind == "forward":
            self._note_facts()
        check = self._input_check(before)
        flag = self._flag(inside, late)
        changed = bool(asserted) or flag is not None
        for call in asserted:
            graph.module.graph.erase_node(call)
        if changed:
            eliminate_dead_calls(graph.module.graph)
            graph.module.recompile()
        return IndexCheckedGraph(graph, check, flag)

    def _unproven(self) -> list[_Requirement]:
        """One for each kind of positions that is not known to be in range."""
        seen: set[Hashable] = set()
        found = []
        for node in self._graph.calls:
            for position in find_index_arguments(node):
                size = to_bound(position.size)
                low = -size if position.negative else 0
                known = self._range(position)
                if (
                    known is not None
                    and is_never_above(low, known[0])
                    and is_never_above(known[1], size - 1)
                ):
                    continue
                self._checked(position, (low, size - 1))
                key = (position.node, str(size), position.negative, position.ignored)
                if key not in seen:
                    seen.add(key)
                    found.append(_Requirement(position, low))
        return found

    def _range(self, position: IndexArgument) -> Range | None:
        known = self._ranges.range_of(position.node)
        if known is not None or position.ignored is not None:
            return known
        value = self._constant(position.node)
        found = None if value is None else range_of_constant(value)
        if found is not None:
            self._ranges.set_range(position.node, found)
        return found

    def _constant(self, node: fx.Node) -> Tensor | None:
        """The value of what depends on constants alone; None: it does not, or is large."""
        cone = self._cone([node])
        leaves = [n for n in cone if n.op == "placeholder"]
        if any(n not in self._constants for n in leaves) or not all(map(_is_static, cone)):
            return None
        if len(cone) > 10 * _MOST_CALLS or any(map(is_random, cone)):
            return None
        values: dict[fx.Node, Any] = {n: self._constants[n] for n in leaves}
        with disable_current_modes(), torch.no_grad():
            for n in cone:
                if n.op == "call_function":
                    args, kwargs = fx.map_arg((n.args, n.kwargs), values.__getitem__)
                    values[n] = n.target(*args, **kwargs)  # type: ignore[operator]
        result = values[node]
        return result if isinstance(result, Tensor) else None

    def _checked(self, position: IndexArgument, within: Range) -> None:
        """Notes what is known of positions that have passed their check."""
        if position.ignored is None:
            self._facts.ranges[position.node.name] = within

    def _note_facts(self) -> None:
        """Notes all that is known of what a backward graph may be given."""
        for node in self._graph.module.graph.nodes:
            value = node.meta.get("val")
            if not isinstance(value, Tensor) or value.dtype == torch.bool:
                continue
            known = None if node in self._constants else self._ranges.range_of(node)
            if known is not None:
                self._facts.ranges.setdefault(node.name, known)

    # Before a call.

    def _is_early(self, requirement: _Requirement) -> bool:
        bound = self._bound_node(requirement.position, make=False)
        return bound is not None and self._is_small([requirement.node])

    def _is_small(self, nodes: Iterable[fx.Node]) -> bool:
        """Returns whether what nodes are computed from the inputs by is little."""
        cone = self._cone(nodes)
        calls = [n for n in cone if n.op == "call_function"]
        if len(calls) > _MOST_CALLS or any(n.op == "get_attr" for n in cone):
            return False
        roles = dict(zip(self._graph.placeholders, self._graph.inputs, strict=True))
        if any(roles[n].role is Role.TANGENT for n in cone if n.op == "placeholder"):
            return False
        if not all(_is_cheap(n) for n in calls):
            return False
        read = [n for n in cone if n.op == "call_function" or not n.users.keys().isdisjoint(calls)]
        return sum(map(_elements, read)) <= _MOST_ELEMENTS

    def _cone(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """Returns all nodes from which some are computed, and these, in order."""
        wanted = set(nodes)
        waiting = list(wanted)
        while waiting:
            for source in waiting.pop().all_input_nodes:
                if source not in wanted:
                    wanted.add(source)
                    waiting.append(source)
        return [n for n in self._graph.module.graph.nodes if n in wanted]

    def _bound_node(self, position: IndexArgument, make: bool = True) -> Any:
        """The size as a number, or as a node that reads it from an input; None: no input has it."""
        size = to_bound(position.size)
        if isinstance(size, int):
            return size
        for place in self._graph.placeholders:
            value = place.meta["val"]
            if isinstance(value, torch.SymInt) and to_bound(value) == size:
                return place
            for dim, s in enumerate(value.shape if isinstance(value, Tensor) else ()):
                if isinstance(s, torch.SymInt) and to_bound(s) == size:
                    return (place, dim)
        return None

    def _input_check(self, checked: Sequence[_Requirement | fx.Node]) -> InputCheck | None:
        if not checked:
            return None
        wanted, bounds = [], []
        for each in checked:
            if isinstance(each, _Requirement):
                wanted.append(each.node)
                bounds.append(self._bound_node(each.position))
            else:
                wanted.append(each)
                bounds.append(None)
        extra = [b[0] if isinstance(b, tuple) else b for b in bounds]
        cone = self._cone([*wanted, *(b for b in extra if isinstance(b, fx.Node))])
        places = self._graph.placeholders
        reads = tuple(i for i, p in enumerate(places) if p in cone and p not in self._constants)
        constants = tuple(value for p, value in self._constants.items() if p in cone)
        copied, copies = fx.Graph(), {}
        for node in cone:
            if node.op == "placeholder":
                copies[node] = copied.placeholder(node.name)
            else:
                copies[node] = copied.node_copy(node, copies.__getitem__)
        results = [
            self._checked_values(copied, copies, each, node, bound)
            for each, node, bound in zip(checked, wanted, bounds, strict=True)
        ]
        copied.output(tuple(itertools.chain.from_iterable(results)))
        weights = {places[i] for i, x in enumerate(self._graph.inputs) if x.role in _STABLE}
        stable = tuple(
            node in weights and isinstance(bound, int)
            for node, bound in zip(wanted, bounds, strict=True)
        )
        return InputCheck(reads, fx.GraphModule(self._graph.module, copied), stable, constants)

    @staticmethod
    def _checked_values(
        graph: fx.Graph, copies: dict[fx.Node, fx.Node], each: Any, node: fx.Node, bound: Any
    ) -> tuple[Any, Any, Any]:
        """The tensor, the least and the largest value; of an assertion no values."""
        tensor: Any = copies[node]
        if not isinstance(each, _Requirement):
            return tensor, None, None
        if isinstance(bound, tuple):
            bound = graph.call_function(aten.sym_size.int, (copies[bound[0]], bound[1]))
        elif isinstance(bound, fx.Node):
            bound = copies[bound]
        if each.position.ignored is not None:
            ignored = graph.call_function(aten.eq.Scalar, (tensor, each.position.ignored))
            tensor = graph.call_function(aten.masked_fill.Scalar, (tensor, ignored, 0))
        if isinstance(bound, int):
            return tensor, (-bound if each.position.negative else 0), bound - 1
        low: Any = graph.call_function(operator.neg, (bound,)) if each.position.negative else 0
        return tensor, low, graph.call_function(operator.sub, (bound, 1))

    # On the way.

    def _flag(self, inside: Sequence[_Requirement], late: Sequence[fx.Node]) -> int | None:
        graph = self._graph.module.graph
        flags = []
        for requirement in inside:
            flags += self._guarded(requirement)
        for condition in late:
            with graph.inserting_before(graph.output_node()):
                failed = self._infer.insert_call(graph, aten.eq.Scalar, condition, 0)
                flags.append(self._any(failed))
        if not flags:
            return None
        output = graph.output_node()
        with graph.inserting_before(output):
            flag = flags[0]
            for other in flags[1:]:
                flag = self._infer.insert_call(graph, aten.bitwise_or.Tensor, flag, other)
        results = self._graph.outputs
        output.args = ((*results, flag),)
        if isinstance(described := output.meta.get("desc"), list | tuple):
            output.meta["desc"] = [*described, None]
        return len(results)

    def _guarded(self, requirement: _Requirement) -> list[fx.Node]:
        """Replaces positions by ones that are in range; returns what says whether they were not."""
        position, graph = requirement.position, self._graph.module.graph
        size = to_bound(position.size)
        if size == 0 or isinstance(position.node.meta["val"], list | tuple):
            return []
        users = [
            (node, p)
            for node in self._graph.calls
            for p in find_index_arguments(node)
            if p.node is position.node
            and (to_bound(p.size), p.negative, p.ignored)
            == (size, position.negative, position.ignored)
        ]
        with graph.inserting_before(users[0][0]):
            call = lambda target, *args: self._infer.insert_call(graph, target, *args)  # noqa: E731
            most, least = self._limits(position, call)
            bad = call(
                aten.bitwise_or.Tensor,
                call(aten.lt.Scalar, position.node, least),
                call(aten.ge.Scalar, position.node, most),
            )
            if position.ignored is not None:
                counts = call(aten.ne.Scalar, position.node, position.ignored)
                bad = call(aten.bitwise_and.Tensor, bad, counts)
            value = position.node.meta["val"]
            zero = graph.call_function(
                aten.full.default, ([], 0), {"dtype": value.dtype, "device": value.device}
            )
            with disable_current_modes(), value.fake_mode:
                zero.meta["val"] = torch.full([], 0, dtype=value.dtype, device=value.device)
            safe = call(aten.where.self, bad, zero, position.node)
            flag = self._any(bad)
        for node, p in users:
            argument: Any = safe
            if p.element is not None:
                argument = list(node.args[p.argument])  # type: ignore[arg-type]
                argument[p.element] = safe
            node.update_arg(p.argument, argument)
        return [flag]

    def _any(self, failed: fx.Node) -> fx.Node:
        """One number of several, by the operator that `aten.any` is decomposed into."""
        if not failed.meta["val"].ndim:
            return failed
        return self._infer.insert_call(self._graph.module.graph, aten.any.dims, failed)

    def _limits(self, position: IndexArgument, call: Callable[..., fx.Node]) -> tuple[Any, Any]:
        """The size, and the least position, as numbers or nodes."""
        size = to_bound(position.size)
        if isinstance(size, int):
            return size, (-size if position.negative else 0)
        assert position.sized is not None, "of positions with symbolic sizes"
        source, dim = position.sized
        node = (
            call(aten.sym_numel.default, source)
            if dim is None
            else call(aten.sym_size.int, source, dim)
        )
        return node, (call(operator.neg, node) if position.negative else 0)


_STABLE = frozenset({Role.BUFFER, Role.PARAMETER, Role.CONSTANT})


def _is_cheap(node: fx.Node) -> bool:
    if is_random(node):
        return False
    if node.target in _SMALL or is_pointwise(node.target):
        return True
    return not isinstance(node.meta.get("val"), Tensor)  # arithmetic on sizes


def _elements(node: fx.Node) -> float:
    """Returns how many elements a tensor has in the first call."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return 0
    sizes = [s.node.hint if isinstance(s, torch.SymInt) else s for s in value.shape]
    return math.inf if None in sizes else math.prod(sizes)


def _is_static(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and all(isinstance(s, int) for s in value.shape)


def suppress_updates_on_error(checks: IndexCheckedGraph) -> IndexCheckedGraph:
    """Keeps the old contents of updated inputs if the flag is set; changes the graph.

    What else is computed from a new value reads what is kept, which is equal unless the flag is
    set and all results are lost. A compiler then has one value to write over the old one; of two
    it would need a copy of the old one.

    Args:
        checks: The checks of a graph of the kind "step", which is changed.
    """
    if checks.flag is None:
        return checks
    graph, infer = checks.graph, ShapeInference()
    results = list(graph.outputs)
    flag = results[checks.flag]
    updates = {at: graph.placeholders[place] for place, at in graph.updates.items()}
    updates = {at: old for at, old in updates.items() if results[at] is not old}
    _compute_before(flag, {results[at] for at in updates})
    order = {node: n for n, node in enumerate(graph.module.graph.nodes)}
    for at, old in updates.items():
        new = results[at]
        last = max(new, flag, *graph.placeholders, key=order.__getitem__)
        with graph.module.graph.inserting_after(last):
            kept = infer.insert_call(graph.module.graph, aten.where.self, flag, old, new)
        later = [user for user in new.users if order.get(user, -1) > order[last]]
        for user in later:
            user.replace_input_with(new, kept)
        results = [kept if r is new and n not in updates else r for n, r in enumerate(results)]
        results[at] = kept
    graph.module.graph.output_node().args = (tuple(results),)
    graph.module.recompile()
    return checks


def _compute_before(value: fx.Node, others: set[fx.Node]) -> None:
    """Moves what a value is computed from before the first of other nodes, unless it needs one."""
    needed: set[fx.Node] = set()
    ahead = [value]
    while ahead:
        node = ahead.pop()
        if node not in needed:
            needed.add(node)
            ahead += node.all_input_nodes
    if needed & others:
        return
    first = None
    for node in list(value.graph.nodes):
        if first is None and node in others and node.op != "placeholder":
            first = node
        elif first is not None and node in needed:
            first.prepend(node)
