"""Interpolation and sampling, forward and backward, against eager."""

import pytest
import torch

from dynamo_backends.xla.lowering.upsampling import linear, nearest
from tests.xla.lowering_checks import assert_like_eager, gradient

aten = torch.ops.aten
X = torch.randn(2, 3, 8, 14, generator=torch.Generator().manual_seed(0))
SIZES = [(8, 14), (16, 28), (5, 20), (21, 9), (1, 1), (40, 4)]
SMOOTH = [
    aten.upsample_bilinear2d,
    aten.upsample_bicubic2d,
    aten._upsample_bilinear2d_aa,
    aten._upsample_bicubic2d_aa,
]


def scales(size):
    """Scale factors that lead to `size` after rounding down, but not exactly."""
    return (size[0] + 0.3) / 8, (size[1] + 0.2) / 14


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", SMOOTH, ids=str)
def test_smooth(op, size):
    for align_corners in (False, True):
        for scale in ((None, None), scales(size)):

            def fn(x, op=op, align_corners=align_corners, scale=scale):
                return op(x, size, align_corners, *scale)

            assert_like_eager(fn, X)
            assert_like_eager(gradient(fn), X)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", [aten.upsample_nearest2d, aten._upsample_nearest_exact2d], ids=str)
def test_nearest(op, size):
    for scale in ((None, None), scales(size)):

        def fn(x, scale=scale):
            return op(x, size, *scale)

        assert_like_eager(fn, X)
        assert_like_eager(gradient(fn), X)


def test_other_ranks():
    assert_like_eager(lambda x: aten.upsample_linear1d(x, [9], False, None), X[0])
    x = X.unflatten(3, (7, 2))
    assert_like_eager(lambda x: aten.upsample_trilinear3d(x, [3, 9, 4], True, None, None, None), x)
    assert_like_eager(lambda x: aten.upsample_nearest3d(x, [3, 9, 4], None, None, None), x)


def test_nan_stays_where_it_is():
    x = X.clone()
    x[0, 0, 2, 2] = torch.nan
    assert_like_eager(lambda x: aten.upsample_bilinear2d(x, (16, 28), False), x)
    assert_like_eager(gradient(lambda x: aten.upsample_bilinear2d(x, (4, 7), False)), x)


@pytest.mark.parametrize("taps", [nearest(5, 13, None), linear(7, 3, False, None)])
def test_a_transposed_table_is_the_transposed_matrix(taps):
    assert (taps.transposed().matrix() == taps.matrix().T).all()


@pytest.mark.parametrize("padding_mode", [0, 1, 2])
@pytest.mark.parametrize("mode", [0, 1, 2])
@pytest.mark.parametrize("align_corners", [False, True])
def test_grid_sampler(mode, padding_mode, align_corners):
    grid = torch.rand(2, 4, 7, 2, generator=torch.Generator().manual_seed(1)) * 3 - 1.5

    def fn(x, grid):
        return aten.grid_sampler_2d(x, grid, mode, padding_mode, align_corners)

    assert_like_eager(fn, X, grid)
    assert_like_eager(gradient(fn), X, grid)
    if mode == 2:
        return  # three dimensions have no bicubic mode
    deep = torch.cat([grid, grid[..., :1]], -1)[:, None]

    def fn3(x, grid):
        return aten.grid_sampler_3d(x, grid, mode, padding_mode, align_corners)

    assert_like_eager(fn3, X.unflatten(3, (7, 2)), deep)
