"""Views, padding and strided views, against eager."""

import pytest
import torch
import torch.nn.functional as F

from dynamo_backends.interface.errors import LoweringError
from tests.xla.harness import run
from tests.xla.lowering_checks import assert_like_eager, gradient

X = torch.arange(120.0).reshape(2, 3, 4, 5)

VIEWS = {
    "slice_negative": lambda x: x[:, -2:, 1:100:2],
    "slice_empty": lambda x: x[:, 2:1],
    "select_negative": lambda x: x.select(-1, -2),
    "split_uneven": lambda x: x.split(3, dim=-1),
    "split_sizes": lambda x: x.split([1, 0, 4], -1),
    "unbind": lambda x: x.unbind(1),
    "cat_skips_empty": lambda x: torch.cat([x, torch.empty(0), x], 1),
    "cat_promotes": lambda x: torch.cat([x.int(), x], 0),
    "roll_flat": lambda x: x.roll(7),
    "roll_more_than_size": lambda x: x.roll((9, -7), (1, 3)),
    "flip": lambda x: x.flip((0, -1)),
    "repeat_new_dim": lambda x: x.repeat(2, 1, 3, 1, 2),
    "repeat_zero": lambda x: x.repeat(0, 1, 1, 1),
    "expand": lambda x: x[:, :1].expand(3, 2, 7, -1, -1),
    "diagonal": lambda x: x.diagonal(-1, 1, 3),
    "unfold_overlapping": lambda x: x.unfold(3, 3, 1),
    "unfold_tiles": lambda x: x.unfold(2, 2, 2),
    "unfold_large": lambda x: x.unfold(1, 3, 2),
    "squeeze_dims": lambda x: x[:1, :, :1].squeeze((0, 2)),
    "view_narrower": lambda x: x.view(torch.int16),
    "view_wider": lambda x: x[..., :4].contiguous().view(torch.float64),
    "view_complex": lambda x: torch.view_as_complex(x[..., :2].contiguous()).view(torch.float32),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2),
    "pixel_unshuffle": lambda x: F.pixel_unshuffle(x[..., :4], 2),
    "slice_scatter_step": lambda x: x.slice_scatter(-x[..., 1::2], 3, 1, None, 2),
    "select_scatter": lambda x: x.select_scatter(-x[:, 0], 1, -1),
    "diagonal_scatter": lambda x: x.diagonal_scatter(-x.diagonal(1, 2, 3), 1, 2, 3),
    "constant_pad_crops": lambda x: F.pad(x, (1, -2, -1, 3), value=2.5),
    "reflect": lambda x: F.pad(x, (2, 3, 1, 0), mode="reflect"),
    "replicate": lambda x: F.pad(x, (2, 6, 1, 0), mode="replicate"),
    "replicate_crops": lambda x: F.pad(x, (-1, 2, 1, -2), mode="replicate"),
    "unfold_columns": lambda x: F.unfold(x, (2, 3), dilation=(1, 2), padding=1, stride=(2, 1)),
    "fold_columns": lambda x: F.fold(
        F.unfold(x, (2, 3), padding=1, stride=(2, 1)), (4, 5), (2, 3), padding=1, stride=(2, 1)
    ),
}


@pytest.mark.parametrize("name", VIEWS)
def test_values(name):
    assert_like_eager(VIEWS[name], X)


@pytest.mark.parametrize(
    "name",
    [
        "slice_negative",
        "select_negative",
        "split_uneven",
        "diagonal",
        "unfold_overlapping",
        "unfold_large",
        "reflect",
        "replicate",
        "replicate_crops",
        "unfold_columns",
        "fold_columns",
        "roll_more_than_size",
    ],
)
def test_gradients(name):
    def first(x):
        out = VIEWS[name](x)
        return out[0] if isinstance(out, tuple) else out

    assert_like_eager(gradient(first), X)


def test_strided_views_of_a_transposed_tensor_follow_its_memory():
    x = X[0, 0].t()
    assert_like_eager(lambda x: x.as_strided((3, 2), (5, 2), 1), x)
    assert_like_eager(lambda x: x.as_strided((2, 3, 3), (1, 5, 1)), x)
    assert_like_eager(lambda x: torch.as_strided_scatter(x, -x[:2, :2], (2, 2), (5, 2), 1), x)


def test_strided_view_past_the_tensor_is_refused():
    with pytest.raises(LoweringError, match="outside the tensor"):
        run(lambda x: x.as_strided((2,), (1,), 3), X[0, 0, 0][1:3])
