"""Lets devices draw random numbers from seeds that torch draws.

What a graph draws in a row becomes functions of one small tensor of seeds, which torch draws before
the block runs; the numbers never pass the host. A draw takes one number of 64 bits from torch's
generator, however large its result is, in graphs as in eager.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from dynamo_backends._torch_private import OpOverload
from dynamo_backends.graph.counter_based_rng import DEFAULTS, SEEDED_DRAW, supports_distribution
from dynamo_backends.graph.graph import Graph, eliminate_dead_calls
from dynamo_backends.graph.random_draws import (
    SWITCHED_OFF,
    counter_draw,
    counter_draw_like,
    counter_redraw,
    draw,
    draws_like_tensor,
    generator_state,
    get_fill_method,
    is_random,
    redraw,
    redraw_seeds,
    seed_draw_arguments,
)
from dynamo_backends.graph.symbolic_sizes import SIZES, collect_varying_sizes

aten = torch.ops.aten

Request = tuple[str, tuple[Any, ...]]
"""The method of `Tensor` that draws, and its arguments."""

# Calls that draw in a shape that is given by numbers. Those in the shape of a tensor are `draw`
# already (see `graph.random`).
_FREE: dict[object, Callable[[fx.Node], Request]] = {
    aten.rand.default: lambda _: ("uniform_", ()),
    aten.randn.default: lambda _: ("normal_", ()),
    aten.randint.default: lambda node: ("random_", (0, node.args[0])),
    aten.randint.low: lambda node: ("random_", (node.args[0], node.args[1])),
}


def replace_draws_by_seeded(graph: Graph) -> bool:
    """Replaces random calls, in place, by `SEEDED_DRAW` on seeds that torch draws.

    Requires: normal form, draws apart from data. Ensures: normal form.

    What has sizes that may vary is drawn by the host, before the block, in the same way: a program
    for larger sizes would number elements in another way.

    Returns:
        Whether the graph was changed.
    """
    groups = list(_groups(graph))
    for group in groups:
        _replace(graph.module.graph, group)
    again = [node for node in graph.calls if node.target is counter_redraw]
    changed = [_replace_redrawn(graph.module.graph, node) for node in again]
    if groups or any(changed):
        eliminate_dead_calls(graph.module.graph)
        graph.module.recompile()
    return bool(groups) or any(changed)


def _groups(graph: Graph) -> Iterator[list[fx.Node]]:
    """Draws in a row; others, which torch makes, stay in their places between them."""
    group: list[fx.Node] = []
    for node in graph.calls:
        if not is_random(node) or node.target in (redraw, counter_redraw):
            continue  # which leaves the generator as it was
        if _request(node) is None or _varies(node):
            if group:
                yield group
            group = []
        if _request(node) is not None:
            group.append(node)
        if _varies(node) and group:
            yield group
            group = []
    if group:
        yield group


def _varies(node: fx.Node) -> bool:
    """Returns whether what is drawn has sizes that may vary."""
    return bool(collect_varying_sizes((node.args, node.kwargs, node.meta.get(SIZES))))


def _request(node: fx.Node) -> Request | None:
    """Returns what a call draws, if a device can."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.device.type != "cpu":
        return None
    if node.target is counter_draw_like:
        method, arguments = str(node.args[1]), tuple(node.args[3:])
    elif node.target is draw:
        method, arguments = str(node.args[0]), tuple(node.args[5:])
    elif node.target in _FREE and not node.kwargs.get("generator"):
        method, arguments = _FREE[node.target](node)
    else:
        return None
    return complete_draw_request(method, value.dtype, arguments)


def complete_draw_request(
    method: str, dtype: torch.dtype, arguments: Sequence[Any]
) -> Request | None:
    """A request with all arguments; None if no device can draw it.

    Args:
        method: Such as "uniform_".
        dtype: Dtype of the result.
        arguments: The first ones of the method's.
    """
    given = (*arguments, *DEFAULTS.get(method, ())[len(arguments) :])
    return (method, given) if supports_distribution(method, dtype, given) else None


def _replace(graph: fx.Graph, group: Sequence[fx.Node]) -> None:
    """Replaces draws in a row, or one whose sizes vary."""
    if _varies(group[0]):
        if group[0].target is not counter_draw_like:
            _draw_apart(group[0])
        return
    with graph.inserting_before(group[0]):
        seeds = _call(graph, draw, seed_draw_arguments(len(group)), group[0].meta)
    for place, node in enumerate(group):
        request = _request(node)
        assert request is not None
        _seeded(graph, node, seeds, place, request)


def _draw_apart(node: fx.Node) -> None:
    """Has the host draw what a device would."""
    request = _request(node)
    assert request is not None
    method, arguments = request
    value = node.meta["val"]
    where = node.args[1:5]
    if node.target is not draw:
        shape = node.args[-1] if node.target not in (aten.randint.default,) else node.args[1]
        where = shape, list(value.stride()), value.dtype, value.device
    node.target, node.args, node.kwargs = counter_draw, (method, *where, *arguments), {}


def _seeded(graph: fx.Graph, node: fx.Node, seeds: fx.Node, place: int, request: Request) -> None:
    """Replaces a call by a function of a seed."""
    value = node.meta["val"]
    method, arguments = request
    where = list(map(int, value.shape)), list(map(int, value.stride())), value.dtype
    with graph.inserting_before(node):
        made = _call(
            graph, SEEDED_DRAW, (seeds, place, method, *where, [*map(float, arguments)]), node.meta
        )
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def match_checkpoint_draws(graph: Graph) -> bool:
    """Makes forward and recomputed draws of a checkpoint use the same counter-based rule.

    Forward and backward may be run by different programs, or one of them in eager. The graph is
    changed in place.

    Requires: normal form, sizes of any kind. Ensures: normal form.

    Returns:
        Whether the graph was changed.
    """
    changed, follows_state = False, False
    for node in graph.calls:
        if node.target is redraw:
            changed |= _draw_alike(graph.module.graph, node, node.args[0])
        elif is_random(node):
            changed |= follows_state and _draw_alike(graph.module.graph, node, None)
            follows_state = node.target is generator_state
    if changed:
        eliminate_dead_calls(graph.module.graph)
        graph.module.recompile()
    return changed


def _draw_alike(graph: fx.Graph, node: fx.Node, state: Any) -> bool:
    """Replaces a draw, or with a state what is drawn again."""
    plain = node
    if state is not None:
        _, target, *args = node.args
        with graph.inserting_before(node):
            plain = graph.call_function(target, tuple(args), node.kwargs)  # type: ignore[arg-type]
        plain.meta = dict(node.meta)
        node.replace_all_uses_with(plain)
    request = _bound_request(plain)
    if request is None:
        if plain is not node:
            plain.replace_all_uses_with(node)
            graph.erase_node(plain)
        return False
    value = get_fill_method(plain)[2]
    drawn = plain.args[0], request[0], value.dtype, *request[1]
    with graph.inserting_before(plain):
        if state is None:
            made = graph.call_function(counter_draw_like, drawn)
        else:
            made = graph.call_function(counter_redraw, (state, *drawn))
    made.meta = {**node.meta, "val": value}
    is_mask = isinstance(plain.meta["val"], tuple | list)
    for read in list(plain.users) if is_mask else [plain]:
        read.replace_all_uses_with(made)
        graph.erase_node(read)
    for done in {plain, node} - ({plain} if not is_mask else set()):
        graph.erase_node(done)
    return True


def _replace_redrawn(graph: fx.Graph, node: fx.Node) -> bool:
    """Replaces what a checkpoint draws again: its seed is drawn again, from the same state."""
    if node.target is not counter_redraw or _varies(node):
        return False
    state, _, method, _, *arguments = node.args
    with graph.inserting_before(node):
        seeds = _call(graph, redraw_seeds, (state, 1), node.meta)
    _seeded(graph, node, seeds, 0, (str(method), tuple(arguments)))
    return True


def _bound_request(node: fx.Node) -> Request | None:
    """Returns what a call draws in the shape of its first argument, if a device can."""
    if not is_random(node) or not draws_like_tensor(node):
        return None
    method, arguments, value = get_fill_method(node)
    return (
        complete_draw_request(method, value.dtype, arguments)
        if value.device.type == "cpu"
        else None
    )


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...], meta: dict[str, Any]) -> fx.Node:
    node = graph.call_function(target, args)
    example = next(x for x in _tensors(meta["val"]))
    fakes = fx.map_arg(args, lambda n: n.meta["val"])
    with example.fake_mode:
        value = target(*fakes)
    node.meta = {**meta, "val": value}
    return node


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


_CHOOSES_ALONE = frozenset({aten._fused_sdp_choice.default})  # who is to draw


class GlobalRngError(Exception):
    """Raised if a call can draw from torch's generator only; the message names the call."""


class PrivateRngMode(TorchDispatchMode):
    """A dispatch mode in which calls draw from a generator of its own with a fixed seed.

    Those for which there is no way to say so raise `GlobalRngError` before they draw.

    Args:
        seed: Seed of the generator.

    Attributes:
        has_drawn: Whether any call has drawn.
    """

    def __init__(self, seed: int = 0):
        super().__init__()
        self.has_drawn = False
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs a call; draws use the private generator or raise."""
        kwargs = kwargs or {}
        if not _draws(func, args, kwargs):
            return func(*args, **kwargs)
        with self:
            made = func.decompose(*args, **kwargs)  # a dropout; in inference mode it comes whole
        if made is not NotImplemented:
            return made
        self.has_drawn = True
        if func is aten.native_dropout.default:
            return self._dropout(*args, **kwargs)
        twin = _with_generator(func)
        if twin is None or _given(func, args, kwargs).get("generator") is not None:
            raise GlobalRngError(f"{func} draws random numbers")
        position = [a.name for a in func._schema.arguments if not a.kwarg_only]
        args = [a for n, a in zip(position, args, strict=False) if n != "generator"]
        return twin(*args, **{**kwargs, "generator": self._generator})

    def _dropout(self, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        """As torch's kernel for CPUs does it."""
        mask = torch.empty(x.shape, dtype=torch.bool).bernoulli_(1 - p, generator=self._generator)
        return x.mul(mask).mul_(0.0 if p == 1 else 1 / (1 - p)), mask


def with_private_rng(
    run: Callable[[list[Any]], Sequence[Any]],
) -> Callable[[list[Any]], Sequence[Any]]:
    """Wraps a function: each call draws the same numbers, none from torch's generator."""

    def call(args: list[Any]) -> Sequence[Any]:
        with PrivateRngMode():
            return run(args)

    return call


def _draws(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    if torch.Tag.nondeterministic_seeded not in func.tags or func in _CHOOSES_ALONE:
        return False
    given = _given(func, args, kwargs)
    return not any(given.get(name) == off for name, off in SWITCHED_OFF)


def _given(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    arguments = func._schema.arguments
    given = dict(zip((a.name for a in arguments), args, strict=False))
    return {a.name: a.default_value for a in arguments} | given | kwargs


def _with_generator(func: OpOverload) -> OpOverload | None:
    """The overload of an operator that takes a generator, if there is one."""
    wanted = _types(func)
    if "generator" in wanted:
        return func
    packet = func.overloadpacket
    for name in packet.overloads():
        found = _types(getattr(packet, name))
        if found.pop("generator", None) is not None and found == wanted:
            return getattr(packet, name)
    return None


def _types(func: OpOverload) -> dict[str, str]:
    return {a.name: str(a.type) for a in func._schema.arguments}
