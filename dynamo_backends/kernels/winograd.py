"""Convolutions by Winograd's minimal filtering where that is faster than oneDNN's (CPU).

oneDNN computes 3×3 and 5×5 convolutions directly. With frozen weights, transformed once, these take
a third to a half of the time (see `winograd_transforms.py`, `winograd.cpp`). Whether they do
depends on shapes and processor, so it is measured. A bias, the addition after it, and a relu are
part of the call.

Convolutions in bfloat16 are among them only if the user asked for `precision="bf16"`: theirs are
other rounding errors than oneDNN's, and larger ones.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
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
)
from dynamo_backends.kernels.timing import fastest
from dynamo_backends.kernels.winograd_transforms import F2, F2_OF_5, F4, Transforms
from dynamo_backends.workers.race import Run

aten = torch.ops.aten

_FILTERINGS = {"F2": F2, "F4": F4, "F2_OF_5": F2_OF_5}
_IN_BFLOAT16 = ("F2",)  # F4 errs 3.4 times as much as a direct convolution, F2 1.5 times
_DIRECT = "direct"
_FEW = 9  # channels: no vector has fewer, and what does has another kernel
_CHUNK = 3 << 20  # bytes of transformed tiles that all threads work on together
_LEAST = 108  # of these tiles: the weight is read once for so many
_OWN_CHUNK = 512 << 10  # bytes of transformed tiles where each thread has its own,
_OWN_WEIGHT = 4 << 20  # which is where the transformed weight takes at most so many


# The library.


@once
def _library() -> Any:
    """Returns the compiled `winograd.cpp`; None if it cannot be compiled here."""
    library = load_kernel(
        __file__,
        TRANSFORMS="\n".join(_struct(name, f) for name, f in _FILTERINGS.items()),
        FUNCTIONS="\n".join(
            [_function(name, "Float", "float") for name in _FILTERINGS]
            + ["#if HAS_BFLOAT16"]
            + [_function(name, "BFloat16", "uint16_t") for name in _IN_BFLOAT16]
            + ["#endif"]
        ),
    )
    if library is None:
        return None
    for name in ("lanes", "panel", "rows", "has_bfloat16"):
        getattr(library, name).restype = ctypes.c_int64
    private.register_channels_last_fallback(CONVOLVE)
    return library


def library_for(weight: Tensor) -> tuple[Any, tuple[Any, ...]] | None:
    """Returns what compiles the library for networks with such a weight, and its arguments."""
    if weight.ndim != 4 or weight.dtype not in KINDS or weight.shape[1] < _FEW:
        return None
    return (_library, ()) if _filterings(weight) else None


def _function(filtering: str, kind: str, number: str) -> str:
    """Returns what is called for one filtering and one type, in C++."""
    return f"""
extern "C" void convolve_{filtering}_{kind}(const {number}* input, const float* u,
        const float* bias, const {number}* residual, {number}* output, float* workspace,
        const Sizes* s) {{
    convolve<{filtering}, {kind}>(input, u, bias, residual, output, workspace, *s);
}}"""


def _struct(name: str, f: Transforms) -> str:
    """Returns the transforms in C++, written out."""
    n = len(f.input)
    lines = [f"struct {name} {{", f"    static constexpr int m = {f.m}, taps = {f.taps};"]
    for what, matrix, body in (
        ("input", f.input, _product_of_rows(f.input)),
        ("output", f.output, _product_of_columns(f.output)),
    ):
        signature = f"const Vec (&d)[{n}], Vec (&r)[{len(matrix)}]"
        lines.append(f"    static inline void {what}({signature}) {{")
        lines += [f"        {line}" for line in body]
        lines.append("    }")
    return "\n".join([*lines, "};"])


def _product_of_rows(matrix: np.ndarray) -> list[str]:
    """r = matrix d; what two points ±p share is computed once: r = even ± odd."""
    lines, done = [], set()
    d = [f"d[{k}]" for k in range(matrix.shape[1])]
    signs = _alternating(len(d))
    for i, row in enumerate(matrix):
        mirrored = [j for j in range(i + 1, len(matrix)) if (matrix[j] == row * signs).all()]
        if mirrored:
            even, odd = f"even{i}", f"odd{i}"
            lines.append(f"const Vec {even} = {_sum(row[::2], d[::2])};")
            lines.append(f"const Vec {odd} = {_sum(row[1::2], d[1::2])};")
            lines += [f"r[{i}] = {even} + {odd};", f"r[{mirrored[0]}] = {even} - {odd};"]
            done.add(mirrored[0])
        elif i not in done:
            lines.append(f"r[{i}] = {_sum(row, d)};")
    return lines


def _product_of_columns(matrix: np.ndarray) -> list[str]:
    """r = matrix d, where of two points ±p the sum or the difference is needed."""
    lines, columns, matrix = [], [], matrix.copy()
    signs = _alternating(len(matrix))
    for k in range(matrix.shape[1]):
        column = [f"d[{k}]"] * len(matrix)
        for other in range(k + 1, matrix.shape[1]):
            if (matrix[:, other] == matrix[:, k] * signs).all() and matrix[:, k].any():
                lines.append(f"const Vec sum{k} = d[{k}] + d[{other}];")
                lines.append(f"const Vec difference{k} = d[{k}] - d[{other}];")
                column = [f"difference{k}" if i % 2 else f"sum{k}" for i in range(len(matrix))]
                matrix[:, other] = 0
        columns.append(column)
    for i, row in enumerate(matrix):
        lines.append(f"r[{i}] = {_sum(row, [column[i] for column in columns])};")
    return lines


def _alternating(count: int) -> np.ndarray:
    return np.where(np.arange(count) % 2, -1, 1)


def _sum(factors: Sequence[float], terms: Sequence[str]) -> str:
    """Returns a weighted sum, those with factor one first, so that the others are multiply-adds."""
    weighted = [(float(f), t) for f, t in zip(factors, terms, strict=True) if f]
    text = ""
    for factor, term in sorted(weighted, key=lambda pair: (pair[0] != 1, abs(pair[0]) != 1)):
        if abs(factor) == 1 and text:
            text = f"({text} {'+' if factor > 0 else '-'} {term})"
        elif factor == 1:
            text = term
        elif not text:
            text = f"Vec({factor!r}f) * {term}"
        else:
            text = f"at::vec::fmadd(Vec({factor!r}f), {term}, {text})"
    return text


class _Sizes(ctypes.Structure):
    """See `Sizes` in winograd.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "height", "width", "channels")),
        *((name, ctypes.c_int64) for name in ("out_height", "out_width", "out_channels")),
        *((name, ctypes.c_int64) for name in ("top", "left", "relu", "chunk", "shared", "threads")),
    )


@functools.lru_cache(maxsize=4096)
def _plan(
    size: torch.Size,
    dtype: torch.dtype,
    channels: int,
    filtering: str,
    padding: tuple[int, int],
    relu: bool,
    threads: int,
) -> KernelCall:
    library, f = _library(), _FILTERINGS[filtering]
    batch, depth, *spatial = size
    shape = _shape(size, channels, padding, f)
    tiles = batch * -(-shape[2] // f.m) * -(-shape[3] // f.m)
    words = depth * dtype.itemsize // 4  # of a pixel
    of_tile = f.input.size * (words + channels)
    rows = library.rows()
    shared = 4 * f.input.size * words * channels > _OWN_WEIGHT
    if shared:
        chunks = max(round(tiles / max(_LEAST, _CHUNK // (4 * of_tile))), 1)
        chunk = -(-tiles // chunks)  # all are about as large
    else:
        most = max(_OWN_CHUNK // (4 * of_tile), rows)
        whole = [n for n in range(1, most + 1) if n % rows in (0, rows * 2 // 3)]
        # As if each had two tiles more, for reading the weight.
        chunk = min(whole, key=lambda n: -(-tiles // (n * threads)) * (n + 2))
    room = -(-chunk // rows) * rows * of_tile * (1 if shared else threads)
    sizes = _Sizes(
        *(batch, *spatial, depth, *shape[2:], channels, *padding, relu, chunk, shared, threads)
    )
    function = getattr(library, f"convolve_{filtering}_{KINDS[dtype]}")
    return KernelCall(function, sizes, shape, words + room)


def _shape(
    size: torch.Size, channels: int, padding: tuple[int, ...], f: Transforms
) -> tuple[int, ...]:
    batch, _, *spatial = size
    less = f.taps - 1
    return (batch, channels, *(n + 2 * p - less for n, p in zip(spatial, padding, strict=True)))


# The operators.


def _convolve(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    filtering: str,
    padding: list[int],
    relu: bool,
) -> Tensor:
    image = image.contiguous(memory_format=torch.channels_last)
    top, left = padding
    channels = _channels(image, weight)
    plan = _plan(
        image.shape, image.dtype, channels, filtering, (top, left), relu, torch.get_num_threads()
    )
    if residual is not None:
        residual = residual.contiguous(memory_format=torch.channels_last)
    if bias is not None:
        bias = bias.to(torch.float32).contiguous()
    return plan(image.dtype, image, weight.contiguous(), bias, residual)


def _convolve_fake(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    filtering: str,
    padding: list[int],
    relu: bool,
) -> Tensor:
    f = _FILTERINGS[filtering]
    shape = _shape(image.shape, _channels(image, weight), tuple(padding), f)
    return image.new_empty(shape).contiguous(memory_format=torch.channels_last)


def _transform(weight: Tensor, filtering: str, panel: int, dtype: torch.dtype) -> Tensor:
    """G g Gᵀ, ``(elements of a tile, panels * C, panel)``: one panel of columns after the other.

    In bfloat16 each word of 32 bits has two rows' numbers: ``(elements, panels * C/2, panel * 2)``.
    """
    g = torch.from_numpy(_FILTERINGS[filtering].weight).to(torch.float64)
    wide = weight.to(torch.float64).unflatten(0, (-1, panel))
    wide = wide.unflatten(2, (-1, elements_per_word(dtype)))
    found = torch.einsum("ai,pocwij,bj->abpcow", g, wide, g).to(dtype)
    return found.contiguous().view(_transform_fake(weight, filtering, panel, dtype).shape)


def _transform_fake(weight: Tensor, filtering: str, panel: int, dtype: torch.dtype) -> Tensor:
    (out, depth), packed = weight.shape[:2], elements_per_word(dtype)
    shape = (_FILTERINGS[filtering].input.size, out // panel * depth // packed, panel * packed)
    return weight.new_empty(shape, dtype=dtype)


def _channels(image: Tensor, weight: Tensor) -> int:
    """Returns the number of channels of the result."""
    return weight.shape[1] * weight.shape[2] // image.shape[1]


CONVOLVE = register_op(
    "winograd(Tensor image, Tensor weight, Tensor? bias, Tensor? residual, str filtering, "
    "int[] padding, bool relu) -> Tensor",
    _convolve,
    _convolve_fake,
)
TRANSFORM = register_op(
    "winograd_weight(Tensor weight, str filtering, int panel, ScalarType dtype) -> Tensor",
    _transform,
    _transform_fake,
)


# The pass.


def use_winograd(module: fx.GraphModule, reduced: bool) -> bool:
    """Lets convolutions be computed by Winograd's filtering where that is faster here.

    Args:
        module: Functional; frozen weights are read by `get_attr` nodes.
        reduced: Also those in bfloat16.

    Returns:
        Whether something has changed.
    """
    changed = False
    for found in convolutions(module.graph):
        if _is_possible(found, reduced):
            way = _fastest(found)
            if way != _DIRECT:
                _replace(found, way)
                changed = True
    module.recompile()
    return changed


def _is_possible(found: Convolution, reduced: bool) -> bool:
    w = found.weight.meta["val"]
    if not (reduced or w.dtype == torch.float32) or found.groups != 1 or set(found.stride) != {1}:
        return False
    if not _filterings(w):
        return False
    library = _library()
    if library is None or (w.dtype == torch.bfloat16 and not library.has_bfloat16()):
        return False
    vector = library.lanes() * elements_per_word(w.dtype)
    return bool(w.shape[1] % vector == 0 and w.shape[0] % library.panel() == 0)


def _filterings(weight: Tensor) -> list[str]:
    """Returns those for kernels of this size and type."""
    size = tuple(weight.shape[2:])
    names = _FILTERINGS if weight.dtype == torch.float32 else _IN_BFLOAT16
    return [name for name in names if size == (_FILTERINGS[name].taps,) * 2]


def _fastest(found: Convolution) -> str:
    """Name of the fastest filtering, unless oneDNN's way is as fast."""
    x, w, padding = found.image.meta["val"], found.weight.meta["val"], list(found.padding)

    def ways() -> dict[str, Run]:
        given = torch.ones(w.shape, dtype=w.dtype)
        pixels = torch.empty(x.shape, dtype=x.dtype)
        direct = private.prepacked_convolution(pixels, given, found.stride, padding, 1)
        runs: dict[str, Run] = {_DIRECT: lambda inputs: [direct(*inputs)]}
        for name in _filterings(w):
            u = TRANSFORM(given, name, _library().panel(), w.dtype)
            runs[name] = lambda inputs, name=name, u=u: [  # type: ignore[misc]
                CONVOLVE(*inputs, u, None, None, name, padding, False)
            ]
        return runs

    layout = (x.shape, strides_of_images(x.shape), x.dtype)
    kind = f"convolution {tuple(w.shape)} {padding}"
    return fastest(kind, _DIRECT, ways, [layout], safe=_safe(w, x))


def _safe(weight: Tensor, image: Tensor) -> str:
    """Returns the kernel that wins most often: the largest tiles, if the image has several."""
    filtering = _filterings(weight)[-1]
    return filtering if min(image.shape[2:]) > _FILTERINGS[filtering].m else _DIRECT


def _replace(found: Convolution, filtering: str) -> None:
    """A convolution, and what follows it that the filtering computes too."""
    node, graph = found.node, found.node.graph
    replaced, residual, relu = [node], None, False
    for follower in followers(node):
        if follower.target is aten.relu.default:
            replaced.append(follower)
            relu = True
            break
        other = _added(follower, replaced[-1])
        if residual is not None or other is None:
            break
        replaced.append(follower)
        residual = other
    weight, bias = skip_bfloat16_cast(found.weight), found.bias and skip_bfloat16_cast(found.bias)
    with graph.inserting_before(replaced[-1]):
        dtype = node.meta["val"].dtype
        u = graph.call_function(TRANSFORM, (weight, filtering, _library().panel(), dtype))
        u.meta["val"] = TRANSFORM(weight.meta["val"], *u.args[1:])
        args = (found.image, u, bias, residual, filtering, found.padding, relu)
        call = graph.call_function(CONVOLVE, args)
    replace(replaced, call)


def _added(follower: fx.Node, value: fx.Node) -> fx.Node | None:
    """Returns what is added to a value by a call, if it is a tensor of the same kind."""
    if follower.target is not aten.add.Tensor or follower.kwargs:
        return None
    others = [n for n in follower.args if n is not value]
    if len(follower.args) != 2 or len(others) != 1 or not isinstance(others[0], fx.Node):
        return None
    x, y = others[0].meta["val"], value.meta["val"]
    same = isinstance(x, Tensor) and x.shape == y.shape and x.dtype == y.dtype
    return others[0] if same else None
