"""Convolutions that read few channels each: of images, and in small groups (CPU).

oneDNN's kernels have vectors of channels. The first layer of a network for images has three of
them, and a group of ResNeXt's has four or eight, so that most of a vector is empty.
`small_channels.cpp` fills its vectors otherwise. Whether it is faster depends on shapes and
processor, so it is measured. A bias, a relu and a max pool after it are part of the call, and so is
the cast of the image to bfloat16 where a graph computes in that.
"""

import ctypes
import functools
import operator
import re
from collections.abc import Sequence
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends.graph.custom_ops import register_op
from dynamo_backends.kernels.native_code import (
    KINDS,
    KernelCall,
    elements_per_word,
    load_kernel,
    once,
)
from dynamo_backends.kernels.patterns import (
    Convolution,
    convolutions,
    followers,
    replace,
    skip_bfloat16_cast,
    strides_of_images,
    with_relu,
)
from dynamo_backends.kernels.timing import fastest
from dynamo_backends.workers.race import Run

aten = torch.ops.aten

_MOST = 4  # channels of an image
_NUMBERS = {torch.float32: "float", torch.bfloat16: "uint16_t"}  # in C++
_CHANNELS = (2, 4, 8)  # of a group; where it has one, oneDNN's kernels fill their vectors too
_STRIDES = (1, 2)  # of convolutions in groups
_WINDOW = 3  # their width
_MOST_POOLED = 8  # rows that a max pool covers
_STRIP = 64 << 10  # bytes of an image that a thread copies at a time,
_POOLED_STRIP = 128 << 10  # or if a pool follows: where strips meet rows are computed twice
_POOL = aten.max_pool2d_with_indices.default
_POOL_DEFAULTS: Any = (None, None, [], [0], [1], False)
_ONEDNN, _OURS = "oneDNN", "few channels"


# The library.


@once
def _library(grouped: bool, dtype: torch.dtype) -> Any:
    """The compiled `small_channels.cpp`; None if it cannot be compiled, or computes no such here.

    Args:
        grouped: Whether it is for convolutions in groups.
        dtype: Dtype of their weights.
    """
    groups = [_groups(channels, stride) for channels, stride in product(_CHANNELS, _STRIDES)]
    sources = {dtype} if grouped else {dtype, torch.float32}
    functions = [
        _function(dtype, source, rows)
        for source, rows in product(sources, groups if grouped else ("Dense",))
    ]
    needed = ["has_groups"] * grouped + ["has_bfloat16"] * (dtype == torch.bfloat16)
    condition = " && ".join(name.upper() for name in needed) or "1"
    text = "\n".join([f"#if {condition}", *functions, "#endif"])
    library = load_kernel(__file__, FUNCTIONS=text, MOST_POOLED=str(_MOST_POOLED))
    if library is None:
        return None
    for name in ("lanes", "panel", "least_pixels", "has_groups", "has_bfloat16"):
        getattr(library, name).restype = ctypes.c_int64
    if not all(getattr(library, name)() for name in needed):
        return None
    if grouped:
        private.register_channels_last_fallback(CONVOLVE_IN_GROUPS)
    return library


def library_for(weight: Tensor) -> tuple[Any, tuple[Any, ...]] | None:
    """Returns what compiles the library for networks with such a weight, and its arguments."""
    if weight.ndim != 4 or weight.dtype not in KINDS:
        return None
    out, channels, _, width = weight.shape
    if channels in _CHANNELS and width == _WINDOW and out > channels:
        return _library, (True, weight.dtype)
    return (_library, (False, weight.dtype)) if 1 < channels <= _MOST else None


def _groups(channels: int, stride: int) -> str:
    return f"Groups<{channels}, {stride}>"


def _function(dtype: torch.dtype, source: torch.dtype, rows: str) -> str:
    """Returns the C++ name of the kernel for types of weights and images and a class of rows."""
    number, kind = _NUMBERS[dtype], KINDS[dtype]
    return f"""
extern "C" void {_name(source, rows)}(const {_NUMBERS[source]}* image, const float* weight,
        const float* bias, {number}* output, {number}* workspace, const Sizes* s) {{
    convolve<{kind}, {rows}>(image, weight, bias, output, workspace, *s);
}}"""


def _name(source: torch.dtype, rows: str) -> str:
    return re.sub(r"\W+", "_", f"{_NUMBERS[source]} {rows}").strip("_")


class _Sizes(ctypes.Structure):
    """See `Sizes` in small_channels.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "channels", "height", "width")),
        *((f"of_{name}", ctypes.c_int64) for name in ("batch", "channel", "row", "pixel")),
        *((name, ctypes.c_int64) for name in ("out_channels", "out_height", "out_width")),
        *((name, ctypes.c_int64) for name in ("window_height", "window_width")),
        *((name, ctypes.c_int64) for name in ("stride_y", "stride_x", "top", "left")),
        *((name, ctypes.c_int64) for name in ("relu", "pooled_height", "pooled_width")),
        *((f"pool_{name}", ctypes.c_int64) for name in ("height", "width", "stride_y", "stride_x")),
        *((name, ctypes.c_int64) for name in ("pool_top", "pool_left", "strip", "row", "threads")),
    )


@functools.lru_cache(maxsize=4096)
def _plan(
    size: torch.Size,
    strides: tuple[int, ...],
    source: torch.dtype,
    packed: torch.Size,
    dtype: torch.dtype,
    geometry: tuple[tuple[int, ...], ...],
    relu: bool,
    threads: int,
) -> KernelCall:
    window, stride, padding, pool = geometry
    shape = _shape(size, packed, dtype, window, stride, padding)
    pooled = pool[6:] or shape[2:]
    over, down, kept = (pool[0], pool[2], pool[0]) if pool else (1, 1, 0)  # rows of results
    grouped = len(packed) == _IN_GROUPS
    library = _library(grouped, dtype)
    pixels = -(-shape[3] // library.least_pixels()) * library.least_pixels()
    row = _covered(pixels, window[1], stride[1]) * size[1]
    copied = (_POOLED_STRIP if pool else _STRIP) // (row * dtype.itemsize)  # rows
    strip = _windows(_windows(copied, window[0], stride[0]), over, down)
    strip = max(min(strip, size[0] * pooled[0] // (4 * threads)), 1)
    strip = -(-pooled[0] // -(-pooled[0] // strip))  # all are about as high
    copied = _covered(_covered(strip, over, down), window[0], stride[0])
    room = copied * row + kept * shape[3] * shape[1]
    sizes = _Sizes(
        *(*size, *strides, *shape[1:], *window, *stride, *padding),
        *(relu, *pooled, *(pool[:6] or _NO_POOL), strip, row, threads),
    )
    rows_of = _groups(packed[3] * elements_per_word(dtype), stride[1]) if grouped else "Dense"
    function = getattr(library, _name(source, rows_of))
    space = -(-threads * room // elements_per_word(dtype))
    return KernelCall(function, sizes, (*shape[:2], *pooled), space)


def _windows(size: int, window: int, stride: int) -> int:
    """Returns the number of windows in a number of rows or columns."""
    return (size - window) // stride + 1


def _covered(count: int, window: int, stride: int) -> int:
    """Returns the number of rows or columns that windows cover."""
    return (count - 1) * stride + window


_NO_POOL = (0,) * 6
_IN_GROUPS = 5  # dimensions that packed weights of groups have


def _shape(
    size: Sequence[int],
    packed: Sequence[int],
    dtype: torch.dtype,
    window: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
) -> tuple[int, ...]:
    """Returns the shape of the convolution's result, before a pool."""
    spatial = zip(size[2:], window, stride, padding, strict=True)
    channels = packed[0] * packed[-1] // elements_per_word(dtype)
    return (size[0], channels, *(_windows(n + 2 * p, w, s) for n, w, s, p in spatial))


# The operators.


def _convolve(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: list[int],
    stride: list[int],
    padding: list[int],
    relu: bool,
    pool: list[int],
) -> Tensor:
    geometry = (tuple(window), tuple(stride), tuple(padding), tuple(pool))
    plan = _plan(
        *(image.shape, image.stride(), image.dtype, weight.shape, weight.dtype),
        *(geometry, relu, torch.get_num_threads()),
    )
    if bias is not None:
        bias = bias.to(torch.float32).contiguous()
    return plan(weight.dtype, image, weight.contiguous(), bias)


def _convolve_fake(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: list[int],
    stride: list[int],
    padding: list[int],
    relu: bool,
    pool: list[int],
) -> Tensor:
    shape = _shape(image.shape, weight.shape, weight.dtype, window, stride, padding)
    result = weight.new_empty(*shape[:2], *(pool[6:] or shape[2:]))
    return result.contiguous(memory_format=torch.channels_last)


def _pack(weight: Tensor, panel: int, dtype: torch.dtype) -> Tensor:
    """Words in the order in which they are read: ``(K/panel, rows, words, panel * in a word)``.

    An odd row of the window is stored as its first pairs and its last pair, of which the first
    number has been in a pair already, and gets weight zero: nothing beside the window is read,
    where there may be infinities.
    """
    rows = weight.to(torch.float32).permute(0, 2, 3, 1).flatten(2)
    if rows.shape[2] % elements_per_word(dtype):
        rows = torch.cat([rows[..., :-1], torch.zeros_like(rows[..., :1]), rows[..., -1:]], 2)
    found = rows.unflatten(0, (-1, panel)).unflatten(3, (-1, elements_per_word(dtype))).to(dtype)
    return found.permute(0, 2, 3, 1, 4).flatten(3).contiguous()


def _pack_fake(weight: Tensor, panel: int, dtype: torch.dtype) -> Tensor:
    out, depth, height, width = weight.shape
    words = -(-width * depth // elements_per_word(dtype))
    shape = (out // panel, height, words, panel * elements_per_word(dtype))
    return weight.new_empty(shape, dtype=dtype)


def _pack_groups(weight: Tensor, lanes: int, dtype: torch.dtype) -> Tensor:
    """Returns the same for groups: ``(K/lanes, rows, columns, words, lanes * in a word)``."""
    words = weight.unflatten(0, (-1, lanes)).unflatten(2, (-1, elements_per_word(dtype))).to(dtype)
    return words.permute(0, 4, 5, 2, 1, 3).flatten(4).contiguous()


def _pack_groups_fake(weight: Tensor, lanes: int, dtype: torch.dtype) -> Tensor:
    out, depth, *window = weight.shape
    shape = (
        out // lanes,
        *window,
        depth // elements_per_word(dtype),
        lanes * elements_per_word(dtype),
    )
    return weight.new_empty(shape, dtype=dtype)


_SIGNATURE = (
    "(Tensor image, Tensor weight, Tensor? bias, int[] window, int[] stride, int[] padding, "
    "bool relu, int[] pool) -> Tensor"  # the pool's window, stride, padding, and result's size
)
CONVOLVE = register_op(f"convolution_of_few_channels{_SIGNATURE}", _convolve, _convolve_fake)
CONVOLVE_IN_GROUPS = register_op(f"convolution_in_groups{_SIGNATURE}", _convolve, _convolve_fake)
PACK = register_op(
    "convolution_of_few_channels_weight(Tensor weight, int panel, ScalarType dtype) -> Tensor",
    _pack,
    _pack_fake,
)
PACK_GROUPS = register_op(
    "convolution_in_groups_weight(Tensor weight, int lanes, ScalarType dtype) -> Tensor",
    _pack_groups,
    _pack_groups_fake,
)


# The pass.


def use_small_channels(module: fx.GraphModule) -> bool:
    """Lets convolutions that read few channels be computed by the kernel here where it is faster.

    Args:
        module: Functional; frozen weights are read by `get_attr` nodes.

    Returns:
        Whether something has changed.
    """
    changed = False
    for found in convolutions(module.graph):
        if _is_possible(found) and _is_faster(found):
            _replace(found)
            changed = True
    module.recompile()
    return changed


def _is_possible(found: Convolution) -> bool:
    w = found.weight.meta["val"]
    out, channels, _, width = w.shape
    if found.groups == 1:
        if channels > _MOST or channels * width < elements_per_word(w.dtype):
            return False
    elif (
        channels not in _CHANNELS
        or out != channels * found.groups
        or width != _WINDOW
        or found.stride[1] not in _STRIDES
    ):
        return False
    library = _library(found.groups > 1, w.dtype)
    return library is not None and out % _operators(found)[1] == 0


def _source(found: Convolution) -> fx.Node:
    """Returns what is read: an image without groups before its cast."""
    return skip_bfloat16_cast(found.image) if found.groups == 1 else found.image


def _operators(found: Convolution) -> tuple[Any, int, Any]:
    """Returns how the weight is packed, for how many channels at once, and how it is called."""
    dtype = found.weight.meta["val"].dtype
    if found.groups == 1:
        return PACK, _library(False, dtype).panel(), CONVOLVE
    return PACK_GROUPS, _library(True, dtype).lanes(), CONVOLVE_IN_GROUPS


def _is_faster(found: Convolution) -> bool:
    source, w = _source(found), found.weight.meta["val"]
    x, dtype, window = source.meta["val"], w.dtype, list(w.shape[2:])
    strides = x.stride() if source.op == "placeholder" else strides_of_images(x.shape)

    def ways() -> dict[str, Run]:
        given, pixels = (torch.ones(shape, dtype=dtype) for shape in (w.shape, x.shape))
        settings = (list(found.stride), list(found.padding))
        by_onednn = private.prepacked_convolution(pixels, given, *settings, found.groups)
        pack, count, convolve = _operators(found)
        packed = pack(given, count, dtype)

        def usual(inputs: list[Tensor]) -> list[Tensor]:
            return [by_onednn(inputs[0].to(dtype, memory_format=torch.channels_last))]

        def ours(inputs: list[Tensor]) -> list[Tensor]:
            return [convolve(inputs[0], packed, None, window, *settings, False, [])]

        return {_ONEDNN: usual, _OURS: ours}

    pooled = bool(_chain(found)[2])  # which is faster in the same call
    kind = f"convolution {tuple(w.shape)} {dtype} {found.stride} {found.padding} {pooled}"
    preferred = _OURS if pooled else _ONEDNN
    layout = (x.shape, strides, x.dtype)
    return fastest(kind, _ONEDNN, ways, [layout], preferred) == _OURS


def _chain(found: Convolution) -> tuple[list[fx.Node], bool, list[int]]:
    """Returns what is computed by one call; whether there is a relu in it, and its max pool."""
    chain, relu = with_relu(found.node)
    after = list(islice(followers(chain[-1]), 2))
    if found.groups > 1 or [n.target for n in after] != [_POOL, operator.getitem]:
        return chain, relu, []
    pool, item = after
    arguments: Any = (*pool.args, *_POOL_DEFAULTS[len(pool.args) :])
    _, window, stride, padding, dilation, _ = arguments
    if item.args[1] != 0 or set(dilation) != {1} or window[0] > _MOST_POOLED:
        return chain, relu, []
    sizes = (window, stride or window, padding, item.meta["val"].shape[2:])
    return [*chain, *after], relu, [n for size in sizes for n in _pair(size)]


def _pair(size: Sequence[int]) -> Sequence[int]:
    """Returns height and width."""
    return [*size] * 2 if len(size) == 1 else size


def _replace(found: Convolution) -> None:
    """A convolution, with the relu and the max pool that follow it."""
    chain, relu, pool = _chain(found)
    pack, count, convolve = _operators(found)
    weight, bias = skip_bfloat16_cast(found.weight), found.bias and skip_bfloat16_cast(found.bias)
    w, graph = found.weight.meta["val"], found.node.graph
    with graph.inserting_before(chain[-1]):
        packed = graph.call_function(pack, (weight, count, w.dtype))
        packed.meta["val"] = pack(weight.meta["val"], *packed.args[1:])
        settings = (list(w.shape[2:]), found.stride, found.padding, relu, pool)
        call = graph.call_function(convolve, (_source(found), packed, bias, *settings))
    replace(chain, call)
