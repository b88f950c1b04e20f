"""Random numbers stay torch's: drawn by torch from its own generator, before any backend block.

Results are then bit-equal to eager's, `torch.manual_seed` does what it does in eager, and blocks
stay whole, because drawing looks at shapes and not at data.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import FakeTensor, has_side_effect
from dynamo_backends.graph.call_arguments import get_argument
from dynamo_backends.graph.counter_based_rng import SEEDED_DRAW
from dynamo_backends.graph.graph import Graph, eliminate_dead_calls
from dynamo_backends.graph.properties import NORMAL_FORM, Pass, Property

aten = torch.ops.aten


@has_side_effect
def draw(
    method: str,
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *args: Any,
) -> Tensor:
    """Fills a new tensor with random numbers of torch's generator, in stride order.

    Args:
        method: The method that fills it, such as "bernoulli_".
        shape: Its sizes.
        strides: Its strides.
        dtype: Its dtype.
        device: Where to draw.
        args: Arguments of the method.
    """
    empty = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    result: Tensor = getattr(empty, method)(*args)
    return result


def seed_draw_arguments(count: int) -> tuple[Any, ...]:
    """Returns the arguments with which `draw` draws `count` int64 seeds.

    Args:
        count: How many.
    """
    return "random_", [count], [1], torch.int64, torch.device("cpu")


@has_side_effect
def counter_draw(
    method: str,
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *args: Any,
) -> Tensor:
    """Draws with the counter-based generator, as devices do, from one seed of torch's.

    Args:
        method: One that `counter_generator` knows.
        shape: Its sizes.
        strides: Its strides.
        dtype: Its dtype.
        device: The CPU.
        args: All arguments of the method.
    """
    empty = torch.empty_strided(shape, strides, dtype=dtype, device=device)
    if isinstance(empty, FakeTensor):
        return empty
    seeds = draw(*seed_draw_arguments(1))
    result: Tensor = SEEDED_DRAW(seeds, 0, method, shape, strides, dtype, [*map(float, args)])
    return result


@has_side_effect
def counter_draw_like(x: Tensor, method: str, dtype: torch.dtype, *args: Any) -> Tensor:
    """Draws as `counter_draw`, with the shape and strides of `torch.empty_like(x)`.

    Args:
        x: Its data are not read.
        method: As for `counter_draw`.
        dtype: Likewise.
        args: Likewise.
    """
    like = torch.empty_like(x, dtype=dtype)
    return counter_draw(method, like.shape, like.stride(), dtype, torch.device("cpu"), *args)


@has_side_effect
def generator_state(device: torch.device) -> Tensor:
    """Returns the current state of torch's CPU or CUDA generator, for `redraw`."""
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def redraw(state: Tensor, draws: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Repeats a draw from an earlier generator state; leaves torch's generator as it is.

    Args:
        state: From `generator_state`.
        draws: The operator; its arguments follow.
        args: Positional ones; one is a tensor on the generator's device, or that device.
        kwargs: The others.
    """
    if isinstance(state, FakeTensor):
        return draws(*args, **kwargs)
    on_cuda = any(_is_on_cuda(x) for x in args)
    read, write = (
        (torch.cuda.get_rng_state, torch.cuda.set_rng_state)
        if on_cuda
        else (torch.get_rng_state, torch.set_rng_state)
    )
    before = read()
    write(state)
    try:
        return draws(*args, **kwargs)
    finally:
        write(before)


def redraw_seeds(state: Tensor, count: int) -> Tensor:
    """Draws seeds again from an earlier generator state; leaves torch's as it is.

    Args:
        state: From `generator_state`.
        count: How many.
    """
    result: Tensor = redraw(state, draw, *seed_draw_arguments(count))
    return result


def counter_redraw(state: Tensor, x: Tensor, method: str, dtype: torch.dtype, *args: Any) -> Tensor:
    """Repeats `counter_draw_like` from an earlier generator state; leaves torch's as it is.

    Args:
        state: From `generator_state`.
        x: Its data are not read.
        method: As for `counter_draw`.
        dtype: Likewise.
        args: Likewise.
    """
    result: Tensor = redraw(state, counter_draw_like, x, method, dtype, *args)
    return result


DRAWS = (
    *(draw, counter_draw, counter_draw_like),
    *(generator_state, redraw, redraw_seeds, counter_redraw),
)
"""Functions that draw, or say what was drawn."""


def _is_on_cuda(argument: Any) -> bool:
    if isinstance(argument, Tensor):
        argument = argument.device
    return isinstance(argument, torch.device) and argument.type == "cuda"


def decompose_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """Decomposes `aten.native_dropout` with the same bits as eager's dropout on a CPU.

    Eager multiplies by mask / (1 - p), rounded to the tensor's dtype, and draws nothing for p = 1;
    `aten.native_dropout`, which takes its place while tracing, differs in both. On other devices
    eager uses that operator itself. Here it draws the mask alone; `train=None` means True, and
    marks that this rule has been applied.
    """
    if x.device.type != "cpu" or not train or p == 0:
        return NotImplemented
    if p == 1:
        zeros = torch.zeros((), dtype=x.dtype, device=x.device)
        return x * zeros, torch.zeros_like(x, dtype=torch.bool)
    mask = aten.native_dropout.default(torch.empty_like(x), p, None)[1]
    return x * (mask.to(x.dtype) / (1.0 - p)), mask


def is_random(node: fx.Node) -> bool:
    """Returns whether a call draws from torch's generator, with the arguments that it has."""
    if node.target in DRAWS:
        return True
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    return not any(get_argument(node, name) == off for name, off in SWITCHED_OFF)


# Arguments with which a call that could draw random numbers does not.
SWITCHED_OFF = (("dropout_p", 0.0), ("train", False), ("training", False))


# Calls that draw in the shape of their first argument: the method that fills a tensor in the same
# way, and its arguments.
_METHODS: dict[object, tuple[str, Callable[[fx.Node], tuple[Any, ...]]]] = {
    aten.rand_like.default: ("uniform_", lambda _: ()),
    aten.randn_like.default: ("normal_", lambda _: ()),
    aten.randint_like.default: ("random_", lambda node: (0, node.args[1])),
    aten.randint_like.low_dtype: ("random_", lambda node: node.args[1:3]),
    aten.bernoulli.p: ("bernoulli_", lambda node: node.args[1:]),
    aten.uniform.default: ("uniform_", lambda node: node.args[1:]),
    aten.normal_functional.default: ("normal_", lambda node: node.args[1:]),
    aten.exponential.default: ("exponential_", lambda node: node.args[1:]),
}


def draws_like_tensor(node: fx.Node) -> bool:
    """Returns whether a call, such as `rand_like`, reads only its argument's shape.

    Calls whose results are not dense are left alone: their strides are not what torch promises.
    """
    if _is_mask(node):
        value = node.meta["val"][1]
    elif node.target in _METHODS and not node.kwargs.get("generator"):
        value = node.meta["val"]
    else:
        return False
    return bool(torch.empty_like(value).stride() == value.stride())


def _is_mask(node: fx.Node) -> bool:
    """Returns whether a call draws the mask of a dropout, and nothing else of it is read."""
    return node.target is aten.native_dropout.default and all(u.args[1] == 1 for u in node.users)


def decouple_draws_from_data(graph: Graph) -> bool:
    """Rewrites calls such as `rand_like`, in place, to draw from sizes alone.

    Requires: normal form, static shapes. Ensures: normal form, `DRAWS_APART`; the same draws in the
    same order; same bits.
    """
    bound = [node for node in graph.calls if is_random(node) and draws_like_tensor(node)]
    for node in bound:
        method, arguments, value = get_fill_method(node)
        with graph.module.graph.inserting_before(node):
            made = _draw(graph.module.graph, method, node.meta, value, arguments)
        for read in list(node.users) if _is_mask(node) else [node]:
            read.replace_all_uses_with(made)
            graph.module.graph.erase_node(read)
        if _is_mask(node):
            graph.module.graph.erase_node(node)
    if bound:
        eliminate_dead_calls(graph.module.graph)
    return bool(bound)


def get_fill_method(node: fx.Node) -> tuple[str, tuple[Any, ...], Tensor]:
    """Returns the in-place method, such as "uniform_", its arguments, and the fake result.

    Args:
        node: For which `draws_like_tensor`.
    """
    value = node.meta["val"]
    if _is_mask(node):
        return "bernoulli_", (1.0 - node.args[1],), value[1]  # type: ignore[operator]
    method, arguments = _METHODS[node.target]
    return method, arguments(node), value


def _draw(
    graph: fx.Graph, method: str, meta: dict[str, Any], value: Tensor, args: tuple[Any, ...]
) -> fx.Node:
    where = (list(value.shape), list(value.stride()), value.dtype, value.device)
    made = graph.call_function(draw, (method, *where, *args))
    made.meta = {**meta, "val": value}
    return made


SEPARATE_DRAWS = Pass(
    name="separate draws",
    summary=(
        "random operators depend on shapes only, so that torch can draw all random numbers first"
    ),
    requires=NORMAL_FORM | {Property.STATIC},
    ensures=frozenset({Property.DRAWS_APART}),
    run=decouple_draws_from_data,
)
