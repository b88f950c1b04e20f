"""3×3 convolutions by Winograd's minimal filtering where that is faster than oneDNN's (CPU).

oneDNN computes them directly on CPUs. With frozen weights, transformed once, these take a third to
a half of the time (see `toolkit/winograd.py`, `winograd.cpp`). Whether they do depends on shapes
and processor, so it is measured. A bias, the addition after it, and a relu are part of the call.
"""

import ctypes
import functools
import importlib.resources
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends.graph.declared import define
from dynamo_backends.inductor.measured import fastest
from dynamo_backends.inductor.native import is_image_on_cpu
from dynamo_backends.toolkit.winograd import F2, F4, Transforms
from dynamo_backends.tuning.race import Run

aten = torch.ops.aten

_TRANSFORMS = {f.m: f for f in (F2, F4)}
_CHUNK = 8 << 20  # bytes of transformed tiles that are worked on at a time
_LEAST = 96  # tiles, for each of which all weights are read

_workspaces = threading.local()


# The library.


@functools.cache
def _library() -> Any:
    """The compiled `winograd.cpp`.

    Raises:
        RuntimeError: It cannot be compiled here.
    """
    folder = importlib.resources.files(__package__)
    source = (folder / "winograd.cpp").read_text(encoding="utf-8")
    code = "\n".join(map(_cpp, _TRANSFORMS.values()))
    library = private.load_cpp(source.replace("@TRANSFORMS@", code))
    for name in ("lanes", "panel", "rows"):
        getattr(library, name).restype = ctypes.c_int64
    private.tell_inductor_of_images(CONVOLVE)
    return library


def _cpp(f: Transforms) -> str:
    """The transforms in C++, written out."""
    n = f.m + 2
    lines = [f"struct F{f.m} {{", f"    static constexpr int m = {f.m};"]
    for name, matrix in (("input", f.input), ("output", f.output)):
        signature = f"const Vec (&d)[{n}], Vec (&r)[{len(matrix)}]"
        lines.append(f"    static inline void {name}({signature}) {{")
        lines += [f"        r[{i}] = {_sum(row)};" for i, row in enumerate(matrix)]
        lines.append("    }")
    return "\n".join([*lines, "};"])


def _sum(factors: np.ndarray) -> str:
    """A weighted sum of the vectors d, those with positive factors first."""
    terms = sorted(enumerate(factors.tolist()), key=lambda term: term[1] < 0)
    text = ""
    for i, factor in terms:
        if factor:
            size = abs(factor)
            sign = "-" if factor < 0 else "+" if text else ""
            text += sign + (f"d[{i}]" if size == 1 else f"Vec({size!r}f) * d[{i}]")
    return text


class _Sizes(ctypes.Structure):
    """See `Sizes` in winograd.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("batch", "height", "width", "channels")),
        *((name, ctypes.c_int64) for name in ("out_height", "out_width", "out_channels")),
        *((name, ctypes.c_int64) for name in ("top", "left", "relu", "chunk", "threads")),
    )


@dataclass(frozen=True)
class _Plan:
    """How a convolution is called.

    Attributes:
        function: Of the library.
        sizes: Its last argument.
        shape: Of the result.
        elements: Of the workspace.
    """

    function: Any
    sizes: Any
    shape: tuple[int, ...]
    elements: int


@functools.lru_cache(maxsize=4096)
def _plan(
    size: torch.Size, channels: int, m: int, padding: tuple[int, int], relu: bool, threads: int
) -> _Plan:
    library = _library()
    batch, depth, *spatial = size
    shape = _shape(size, channels, padding)
    tiles = batch * -(-shape[2] // m) * -(-shape[3] // m)
    of_tile = (m + 2) ** 2 * (depth + channels)
    chunk = min(max(_LEAST, _CHUNK // (4 * of_tile)), tiles)
    chunk = -(-chunk // library.rows()) * library.rows()
    sizes = _Sizes(batch, *spatial, depth, *shape[2:], channels, *padding, relu, chunk, threads)
    function = getattr(library, f"convolve{m}")
    return _Plan(function, ctypes.byref(sizes), shape, depth + chunk * of_tile)


def _shape(size: torch.Size, channels: int, padding: tuple[int, ...]) -> tuple[int, ...]:
    batch, _, *spatial = size
    return (batch, channels, *(n + 2 * p - 2 for n, p in zip(spatial, padding, strict=True)))


def _workspace(elements: int) -> Tensor:
    """Memory for transformed tiles, the same for all calls of a thread."""
    known: Tensor | None = getattr(_workspaces, "memory", None)
    if known is None or known.numel() < elements:
        known = _workspaces.memory = torch.empty(elements)
    return known


# The operators.


def _convolve(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    m: int,
    padding: list[int],
    relu: bool,
) -> Tensor:
    image = image.contiguous(memory_format=torch.channels_last)
    top, left = padding
    channels = _channels(image, weight)
    plan = _plan(image.shape, channels, m, (top, left), relu, torch.get_num_threads())
    result = torch.empty(plan.shape, memory_format=torch.channels_last)
    if residual is not None:
        residual = residual.contiguous(memory_format=torch.channels_last)
    if bias is not None:
        bias = bias.contiguous()
    tensors = (image, weight.contiguous(), bias, residual, result, _workspace(plan.elements))
    plan.function(
        *(None if t is None else ctypes.c_void_p(t.data_ptr()) for t in tensors), plan.sizes
    )
    return result


def _convolve_fake(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    m: int,
    padding: list[int],
    relu: bool,
) -> Tensor:
    shape = _shape(image.shape, _channels(image, weight), tuple(padding))
    return image.new_empty(shape).contiguous(memory_format=torch.channels_last)


def _transform(weight: Tensor, m: int, panel: int) -> Tensor:
    """G g Gᵀ, ``(elements of a tile, panels * C, panel)``: one panel of columns after the other."""
    g = torch.from_numpy(_TRANSFORMS[m].weight).to(torch.float64)
    wide = weight.to(torch.float64).unflatten(0, (-1, panel))
    found = torch.einsum("ai,pocij,bj->abpco", g, wide, g).to(weight.dtype)
    return found.contiguous().view(_transform_fake(weight, m, panel).shape)


def _transform_fake(weight: Tensor, m: int, panel: int) -> Tensor:
    out, depth = weight.shape[:2]
    return weight.new_empty((m + 2) ** 2, out // panel * depth, panel)


def _channels(image: Tensor, weight: Tensor) -> int:
    """Of the result."""
    return weight.shape[1] // image.shape[1] * weight.shape[2]


CONVOLVE = define(
    "winograd(Tensor image, Tensor weight, Tensor? bias, Tensor? residual, int m, int[] padding, "
    "bool relu) -> Tensor",
    _convolve,
    _convolve_fake,
)
TRANSFORM = define(
    "winograd_weight(Tensor weight, int m, int panel) -> Tensor", _transform, _transform_fake
)


# The pass.


def filter_minimally(module: fx.GraphModule) -> bool:
    """Lets convolutions be computed by Winograd's filtering where that is faster here.

    Where torch is told to be deterministic nothing is measured and nothing changes.

    Args:
        module: Functional; frozen weights are read by `get_attr` nodes.

    Returns:
        Whether something has changed.
    """
    if torch.are_deterministic_algorithms_enabled():
        return False
    frozen, changed = _constants(module.graph), False
    for node in module.graph.find_nodes(op="call_function", target=aten.convolution.default):
        if _is_possible(node, frozen):
            m = _fastest(node)
            if m:
                _replace(node, m)
                changed = True
    module.recompile()
    return changed


def _constants(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose values depend on weights alone."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        known = node.op == "call_function" and node.all_input_nodes
        if node.op == "get_attr" or (known and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return found


def _is_possible(node: fx.Node, frozen: Collection[fx.Node]) -> bool:
    image, weight, _, *geometry = node.args
    if weight not in frozen or not isinstance(image, fx.Node) or not isinstance(weight, fx.Node):
        return False
    stride, padding, dilation, transposed, _, groups = geometry
    x, w, result = (n.meta["val"] for n in (image, weight, node))
    if not is_image_on_cpu(x) or x.dtype != torch.float32 or transposed or groups != 1:
        return False
    plain = all(n == 1 for n in (*stride, *dilation)) and len(padding) == 2  # type: ignore[misc, arg-type]
    if not plain or tuple(w.shape[2:]) != (3, 3) or not result.numel() or not x.numel():
        return False
    return bool(w.shape[1] % _library().lanes() == 0 and w.shape[0] % _library().panel() == 0)


def _fastest(node: fx.Node) -> int:
    """Outputs along a side of the tiles of the fastest filtering; 0 if it is oneDNN's."""
    image, weight, _, _, padding, *_ = node.args
    x, w = (n.meta["val"] for n in (image, weight))  # type: ignore[union-attr]
    channels_last = torch.empty(x.shape, device="meta").to(memory_format=torch.channels_last)

    def ways() -> dict[str, Run]:
        given = torch.ones(w.shape)
        direct = private.prepacked_convolution(torch.empty(x.shape), given, padding)  # type: ignore[arg-type]
        runs: dict[str, Run] = {"0": lambda inputs: [direct(*inputs)]}
        for m in _TRANSFORMS:
            u = TRANSFORM(given, m, _library().panel())
            runs[str(m)] = lambda inputs, m=m, u=u: [  # type: ignore[misc]
                CONVOLVE(*inputs, u, None, None, m, padding, False)
            ]
        return runs

    layout = (x.shape, channels_last.stride(), x.dtype)
    kind = f"3x3 convolution {tuple(w.shape)} {padding}"
    return int(fastest(kind, "0", ways, [layout]))


def _replace(node: fx.Node, m: int) -> None:
    """A convolution, and what follows it that the filtering computes too."""
    image, weight, bias, _, padding, *_ = node.args
    replaced, residual, relu = [node], None, False
    for follower in _chain(node):
        if follower.target is aten.relu.default:
            replaced.append(follower)
            relu = True
            break
        other = _added(follower, replaced[-1])
        if residual is not None or other is None:
            break
        replaced.append(follower)
        residual = other
    graph, last = node.graph, replaced[-1]
    with graph.inserting_before(last):
        u = graph.call_function(TRANSFORM, (weight, m, _library().panel()))
        u.meta["val"] = TRANSFORM(weight.meta["val"], *u.args[1:])  # type: ignore[union-attr]
        args = (image, u, bias, residual, m, padding, relu)
        call = graph.call_function(CONVOLVE, args)
    call.meta = dict(last.meta)
    last.replace_all_uses_with(call)
    for old in reversed(replaced):
        graph.erase_node(old)


def _chain(node: fx.Node) -> Iterator[fx.Node]:
    """The only user of a node, that one's only user, and so on."""
    while len(node.users) == 1:
        (node,) = node.users
        yield node


def _added(follower: fx.Node, value: fx.Node) -> fx.Node | None:
    """What is added to a value by a call, if it is a tensor of the same kind."""
    if follower.target is not aten.add.Tensor or follower.kwargs:
        return None
    others = [n for n in follower.args if n is not value]
    if len(follower.args) != 2 or len(others) != 1 or not isinstance(others[0], fx.Node):
        return None
    x, y = others[0].meta["val"], value.meta["val"]
    same = isinstance(x, Tensor) and x.shape == y.shape and x.dtype == y.dtype
    return others[0] if same else None
