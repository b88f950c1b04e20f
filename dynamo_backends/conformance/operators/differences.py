"""Differences from eager that docs/differences.md lists, in results with extremes.

A row excuses single elements of a result, by what eager and the backend have there, so another
error in the same operator is still found.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Kind(NamedTuple):
    """The kind of elements that may differ.

    Attributes:
        excuses: The elements, of eager's result and the backend's.
        needs: Only in samples that hold such elements.
        of_integers: The elements are integers instead of floating-point numbers.
    """

    excuses: Callable[[Tensor, Tensor], Tensor]
    needs: Callable[[Tensor], Tensor] | None = lambda x: ~x.isfinite()
    of_integers: bool = False


LOSES_NAN = Kind(lambda eager, result: eager.isnan() & ~result.isnan())
SPREADS_NAN = Kind(lambda eager, result: result.isnan() & ~eager.isnan())
ENDS_AT_LARGEST = Kind(
    lambda eager, result: (
        eager.isinf() & (result == eager.clamp(*_bounds(eager)))  # infinities are never in between
    )
)
ZERO_SIGNS = Kind(lambda eager, result: (eager == 0) & (result == 0), needs=None)
ENDS_AT_32_BITS = Kind(
    lambda eager, result: result == eager.clamp(-(2**31), 2**31 - 1),
    needs=None,
    of_integers=True,
)
FOLLOWS_NAN = Kind(lambda eager, result: torch.ones_like(eager, dtype=torch.bool), torch.isnan)
"""What is put to the places of maxima, which are open where there is NaN."""


def _bounds(tensor: Tensor) -> tuple[float, float]:
    info = torch.finfo(tensor.dtype)
    return info.min, info.max


class Difference(NamedTuple):
    """Some operators' difference on a backend.

    Attributes:
        backend: Its name.
        kind: Which elements differ.
        bullet: The bold words of the bullet in docs/differences.md.
        operators: Full names in the operator database.
    """

    backend: str
    kind: Kind
    bullet: str
    operators: tuple[str, ...]


_ACTIVATIONS = "NaN through activations and maximum pools."
_CONVOLUTIONS = "Infinities in convolutions."
_MEANS = "Infinities in means."
_ZEROS = "Signs of zeros on `onnxrt`, `ov` and `iree`."
_CASTS = "Casts of large numbers to integers on `ov`."
_SLOPES = "Slopes that are no numbers."
_GRIDS = "NaN and infinities in `grid_sample`."
_SAMPLERS = ("grid_sampler_2d", "nn.functional.grid_sample")
_TRANSPOSED = tuple(f"nn.functional.conv_transpose{n}d" for n in (1, 2, 3))

DECLARED: tuple[Difference, ...] = (
    Difference(
        "onnxrt",
        LOSES_NAN,
        _ACTIVATIONS,
        (
            "nn.functional.adaptive_max_pool1d",
            "nn.functional.adaptive_max_pool2d",
            "nn.functional.adaptive_max_pool3d",
            "nn.functional.max_pool1d",
            "nn.functional.max_pool2d",
            "nn.functional.max_pool3d",
        ),
    ),
    Difference("onnxrt", FOLLOWS_NAN, _ACTIVATIONS, ("max_pool2d_with_indices_backward",)),
    *(
        Difference(backend, LOSES_NAN, _MEANS, ("native_group_norm", "nn.functional.instance_norm"))
        for backend in ("onnxrt", "ov")
    ),
    Difference(
        "onnxrt",
        ZERO_SIGNS,
        _ZEROS,
        (
            "frac",
            "heaviside",
            "nn.functional.celu",
            "nn.functional.prelu",
            "special.entr",
            "trunc",
        ),
    ),
    Difference("onnxrt", LOSES_NAN, _SLOPES, ("nn.functional.prelu",)),
    Difference("onnxrt", LOSES_NAN, _GRIDS, _SAMPLERS),
    *(Difference(backend, SPREADS_NAN, _GRIDS, _SAMPLERS) for backend in ("onnxrt", "ov")),
    Difference(
        "ov",
        LOSES_NAN,
        _ACTIVATIONS,
        (
            "nn.functional.adaptive_max_pool1d",
            "nn.functional.adaptive_max_pool2d",
            "nn.functional.adaptive_max_pool3d",
            "masked.normalize",
            "masked.softmax",
            "masked.softmin",
            "nn.functional.cosine_embedding_loss",
            "nn.functional.cross_entropy",
            "nn.functional.hardsigmoid",
            "nn.functional.hardtanh",
            "nn.functional.hinge_embedding_loss",
            "nn.functional.linear_cross_entropy",
            "nn.functional.margin_ranking_loss",
            "nn.functional.max_pool2d",
            "nn.functional.max_pool3d",
            "nn.functional.normalize",
            "nn.functional.relu",
            "nn.functional.relu6",
            "nn.functional.softmin",
            "nn.functional.triplet_margin_loss",
            "nn.functional.triplet_margin_with_distance_loss",
            "softmax",
            "torch.ops.aten._safe_softmax.default",
        ),
    ),
    Difference("ov", LOSES_NAN, _CONVOLUTIONS, ("nn.functional.conv1d", "nn.functional.conv2d")),
    Difference("ov", SPREADS_NAN, _CONVOLUTIONS, ("nn.functional.conv3d",)),
    Difference("ov", ENDS_AT_32_BITS, _CASTS, ("masked.logsumexp",)),
    Difference("ov", ZERO_SIGNS, _ZEROS, ("nn.functional.elu", "nn.functional.selu")),
    *(Difference(backend, SPREADS_NAN, _CONVOLUTIONS, _TRANSPOSED) for backend in ("tvm", "iree")),
    Difference("iree", SPREADS_NAN, _CONVOLUTIONS, ("nn.functional.bilinear",)),
    Difference("iree", LOSES_NAN, _MEANS, ("native_group_norm", "nn.functional.instance_norm")),
    Difference(
        "iree",
        ZERO_SIGNS,
        _ZEROS,
        (
            "expm1",
            "log1p",
            "nn.functional.celu",
            "nn.functional.elu",
            "nn.functional.selu",
            "nn.functional.softshrink",
            "special.log_ndtr",
        ),
    ),
)


def declared(backend: str, operator: str, inputs: Sequence[Any]) -> list[Difference]:
    """Returns the declared differences that apply to an operator on these inputs."""
    floats = [
        x
        for x in inputs
        if isinstance(x, Tensor) and x.is_floating_point() and x.layout is torch.strided
    ]
    rows = [d for d in DECLARED if d.backend == backend and operator in d.operators]
    return [d for d in rows if _has(floats, d.kind.needs)]


def _has(tensors: Sequence[Tensor], needs: Callable[[Tensor], Tensor] | None) -> bool:
    return needs is None or any(bool(needs(x).any()) for x in tensors)


def mask_declared_differences(
    rows: Sequence[Difference], expected: Sequence[Any], results: Sequence[Any]
) -> list[Any]:
    """Returns results with eager's values where a declared difference is allowed.

    Positions, such as those of maxima, may be others where the values may, or are NaN.
    """
    if len(expected) != len(results):
        return list(results)
    pairs = list(zip(expected, results, strict=True))
    masks = [_mask(rows, e, r) for e, r in pairs]
    positions = [
        mask | e.isnan()
        for (e, _), mask in zip(pairs, masks, strict=True)
        if mask is not None and e.is_floating_point()
    ]
    return [
        r if mask is None else torch.where(_or_positions(mask, e, positions), e, r)
        for (e, r), mask in zip(pairs, masks, strict=True)
    ]


def _mask(rows: Sequence[Difference], e: Any, r: Any) -> Tensor | None:
    """Returns which elements of two results may differ; None if they are not comparable."""
    tensors = isinstance(e, Tensor) and isinstance(r, Tensor)
    if not tensors or e.dtype != r.dtype or e.shape != r.shape:
        return None
    mask = torch.zeros_like(e, dtype=torch.bool)
    for row in rows:
        if row.kind.of_integers != e.is_floating_point():
            mask |= row.kind.excuses(e, r)
    return mask


def _or_positions(mask: Tensor, e: Tensor, positions: Sequence[Tensor]) -> Tensor:
    for other in positions if e.dtype == torch.int64 else ():
        mask = mask | other if other.shape == mask.shape else mask
    return mask
