"""Finds patterns in graphs with frozen weights, and replaces them by ATen's kernels."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.graph.custom_ops import NAMESPACE, register_op_like
from dynamo_backends.graph.graph import Graph
from dynamo_backends.kernels.native_code import KINDS

aten = torch.ops.aten

CAST = torch.ops.prims.convert_element_type.default


def frozen_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose values depend on weights alone, which `get_attr` nodes read."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        known = node.op == "call_function" and node.all_input_nodes
        if node.op == "get_attr" or (known and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return found


def linear_layer(
    node: fx.Node, frozen: Collection[fx.Node]
) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """Matches a linear layer; returns input, weight and bias nodes, or None.

    Args:
        node: Any node.
        frozen: See `frozen_nodes`. Weight and bias are among them; layers in another type than
            float32, and not on a CPU, are none.
    """
    if node.target is aten.addmm.default and not node.kwargs:
        bias, x, weight = node.args
    elif node.target is aten.mm.default:
        bias, (x, weight) = None, node.args
    else:
        return None
    if weight not in frozen or x in frozen or not (bias is None or bias in frozen):
        return None
    values: list[Any] = [None if n is None else n.meta["val"] for n in (x, weight, bias)]  # type: ignore[union-attr]
    given, w, b = values
    if given.device.type != "cpu" or given.dtype != torch.float32:
        return None
    if not given.numel() or not (b is None or b.shape == (w.shape[1],)):
        return None
    return x, weight, bias  # type: ignore[return-value]


@dataclass(frozen=True)
class Convolution:
    """A convolution of images by a frozen weight; numbers are those of height and width.

    Attributes:
        node: The call.
        image: What it reads.
        weight: Its weight.
        bias: Its bias, if it has one.
        stride: Steps of the window.
        padding: Pixels on each side of the image.
        groups: Groups of channels.
    """

    node: fx.Node
    image: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    stride: Sequence[int]
    padding: Sequence[int]
    groups: int


def convolutions(graph: fx.Graph) -> Iterator[Convolution]:
    """Convolutions that kernels here may compute.

    Their weights are frozen, and they are neither transposed nor dilated; images are on a CPU, and
    of a type in `KINDS`. None has an empty input or result. A graph may be changed meanwhile.
    """
    frozen = frozen_nodes(graph)
    for node in graph.find_nodes(op="call_function", target=aten.convolution.default):
        arguments: Any = node.args
        image, weight, bias, stride, padding, dilation, transposed, _, groups = arguments
        x = image.meta["val"]
        if weight not in frozen or not is_image_on_cpu(x) or x.dtype not in KINDS:
            continue
        plain = not transposed and len(stride) == len(padding) == 2 and set(dilation) == {1}
        if plain and x.numel() and node.meta["val"].numel():
            yield Convolution(node, image, weight, bias, stride, padding, groups)


def strides_of_images(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns those of an image that is channels last."""
    return torch.empty(shape, device="meta").to(memory_format=torch.channels_last).stride()


def followers(node: fx.Node) -> Iterator[fx.Node]:
    """The only user of a node, that one's only user, and so on."""
    while len(node.users) == 1:
        (node,) = node.users
        yield node


def with_relu(node: fx.Node) -> tuple[list[fx.Node], bool]:
    """Returns a node, followed by its relu if that is the only user; and whether it is."""
    follower = next(followers(node), None)
    if follower is not None and follower.target is aten.relu.default:
        return [node, follower], True
    return [node], False


def replace(nodes: list[fx.Node], call: fx.Node) -> None:
    """Lets a call take the place of a chain of nodes, each of which has only the next one as user.

    Args:
        nodes: The chain.
        call: What computes the last one's value.
    """
    last = nodes[-1]
    call.meta = dict(last.meta)
    last.replace_all_uses_with(call)
    for node in reversed(nodes):
        node.graph.erase_node(node)


def skip_bfloat16_cast(node: fx.Node) -> fx.Node:
    """Returns the float32 value before a bfloat16 cast, or the value itself."""
    if node.target is not CAST:
        return node
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source if is_float32(source.meta["val"]) else node


def is_float32(value: Any) -> bool:
    """Returns whether a value is float32, or a tuple of which an item is."""
    if isinstance(value, tuple | list):
        return any(map(is_float32, value))
    return isinstance(value, Tensor) and value.dtype == torch.float32


_TAGS = {torch.Tag.needs_fixed_stride_order, torch.Tag.nondeterministic_seeded}


def declare_replacement(name: str, like: Any, kernel: Callable[..., Any]) -> Any:
    """Declares a custom operator that replaces an ATen one and keeps its strides."""
    # Inductor gives it the strides of the graph, and not those that were traced (see `layouts`).
    tags = {torch.Tag.needs_fixed_stride_order, *like.tags} & _TAGS
    declared = register_op_like(name, like, kernel, tags)
    _replaced[declared] = like
    return declared


_replaced: dict[Any, Any] = {}
"""ATen's operators, by those that replace them."""


def in_aten(graph: Graph) -> Graph:
    """Returns a copy of a graph that calls ATen's operators in place of those that replace them."""
    result = graph.copy()
    for node in result.calls:
        node.target = _replaced.get(node.target, node.target)
    result.module.recompile()
    return result


def _convolution_backward(*args: Any) -> tuple[Any, ...]:
    """ATen's, but gradients of weights are contiguous, as parameters are."""
    gradient, of_weight, of_bias = aten.convolution_backward.default(*args)
    return gradient, None if of_weight is None else of_weight.contiguous(), of_bias


_in_order: dict[str, Any] = {}
_lock = fork_safe_lock()


def keep_stride_order(operator: Any) -> Any:
    """Returns an operator alias for which Inductor keeps the graph's strides.

    Args:
        operator: One of ATen's, or what this function returned.
    """
    namespace, _, name = operator.name().partition("::")
    if namespace == NAMESPACE:
        return operator
    with _lock:
        if name not in _in_order:
            _in_order[name] = declare_replacement(name.replace(".", "_"), operator, operator)
        return _in_order[name]


CONVOLUTION_BACKWARD = declare_replacement(
    "convolution_backward", aten.convolution_backward.default, _convolution_backward
)
POOLS: Mapping[Any, Any] = {
    pool: keep_stride_order(pool)
    for pool in (
        aten.max_pool2d_with_indices.default,
        aten.max_pool2d_with_indices_backward.default,
    )
}
"""From ATen's operators to those that Inductor does not decompose."""


def is_image_on_cpu(value: Any) -> bool:
    """Returns whether a value is a tensor of four dimensions in the memory of the CPU."""
    return isinstance(value, Tensor) and value.ndim == 4 and value.device.type == "cpu"
