"""Gradients of convolutions: by oneDNN, or that of the weight as a product, whatever is faster.

oneDNN's kernel shares its work out badly where images are small and channels many, as at the end
of a ResNet, and for convolutions of single pixels. There a product of the gradient with a matrix of
all patches of the image takes half the time. It depends on the processor, so it is measured.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends.kernels.patterns import CONVOLUTION_BACKWARD, declare_replacement
from dynamo_backends.kernels.timing import fastest
from dynamo_backends.workers.race import Run

aten = torch.ops.aten

_LARGEST = 32 * 2**20  # bytes of patches; more would raise the peak of a step's memory


def _by_product(
    gradient: Tensor, image: Tensor, weight: Tensor, bias_sizes: Sequence[int] | None, *rest: Any
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    stride, padding, *_, (of_image, _, of_bias) = rest
    found = None
    if of_image:
        settings = (*rest[:-1], [True, False, False])
        found, _, _ = aten.convolution_backward(gradient, image, weight, bias_sizes, *settings)
    rows = gradient.permute(1, 0, 2, 3).flatten(1)
    product = rows @ _patches(image, weight.shape[2:], stride, padding).mT
    return found, product.view(weight.shape), gradient.sum((0, 2, 3)) if of_bias else None


def _patches(
    image: Tensor, window: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """One column for each place of the window, one row for each number that it shows there."""
    if max(window) == 1 and max(stride) == 1 and not any(padding):
        return image.permute(1, 0, 2, 3).flatten(1)
    (top, left) = padding
    padded = torch.nn.functional.pad(image, (left, left, top, top))
    height, width = (
        (n - w) // s + 1 for n, w, s in zip(padded.shape[2:], window, stride, strict=True)
    )
    n, c, y, x = padded.stride()
    sizes = (image.shape[1], *window, len(image), height, width)
    strides = (c, y, x, n, y * stride[0], x * stride[1])
    return padded.as_strided(sizes, strides).reshape(-1, len(image) * height * width)


BY_PRODUCT = declare_replacement(
    "convolution_backward_by_product", aten.convolution_backward.default, _by_product
)


def choose_kernels(module: fx.GraphModule) -> None:
    """Lets gradients of weights be computed as products where that is faster on this machine.

    Args:
        module: Functional, its nodes with values.
    """
    for node in module.graph.find_nodes(op="call_function", target=CONVOLUTION_BACKWARD):
        if _is_possible(node):
            node.target = _faster(node)
    module.recompile()


def _is_possible(node: fx.Node) -> bool:
    sizes = [n.meta["val"].shape for n in node.all_input_nodes]
    settings: Any = node.args[4:]
    _, _, dilation, transposed, _, groups, mask = settings
    plain = not transposed and groups == 1 and all(d == 1 for d in dilation)
    return bool(mask[1] and plain and all(map(math.prod, sizes)) and _patches_fit(node))


def _patches_fit(node: fx.Node) -> bool:
    gradient, image, weight = (n.meta["val"] for n in node.all_input_nodes)
    rows, columns = math.prod(weight.shape[1:]), gradient.numel() // gradient.shape[1]
    return bool(rows * columns * image.element_size() <= _LARGEST)


def _faster(node: fx.Node) -> Any:
    nodes: Any = node.args[:3]
    layouts = [(x.shape, x.stride(), x.dtype) for x in (n.meta["val"] for n in nodes)]
    settings = node.args[3:]
    ways = {"aten": CONVOLUTION_BACKWARD, "product": BY_PRODUCT}

    def runs() -> dict[str, Run]:
        def run(given: list[Tensor], operator: Any) -> Any:
            return operator(*given, *settings)

        return {name: partial(run, operator=op) for name, op in ways.items()}

    return ways[fastest(f"gradient {settings}", "aten", runs, layouts)]
