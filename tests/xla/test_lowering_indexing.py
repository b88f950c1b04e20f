"""Gathering and scattering, against eager."""

import pytest
import torch
import torch.nn.functional as F

from dynamo_backends.xla.lowering import registry
from tests.xla.harness import capture, run
from tests.xla.lowering_checks import assert_like_eager, gradient

X = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0))
NEGATIVE = torch.tensor([3, -1, 0, -2])
UP = torch.tensor([[1, 0, 2], [2, 2, 0]])

# Each takes X, NEGATIVE and UP.
READS = {
    "adjacent": lambda x, i, up: x[:, i, up[0, :1]],
    "apart": lambda x, i, up: x[i, :, i],
    "broadcast": lambda x, i, up: x[i[:, None], up[0]],
    "none_first": lambda x, i, up: x[None, :, i],
    "index_select": lambda x, i, up: x.index_select(1, up[0]),
    "gather_partial": lambda x, i, up: x[0].gather(1, up),
    "gather_whole": lambda x, i, up: x[0].gather(0, up.repeat(1, 2)),
    "take_negative": lambda x, i, up: x.take(i * 30),
    "embedding": lambda x, i, up: F.embedding(up, x[0], padding_idx=2),
    "embedding_by_frequency": lambda x, i, up: F.embedding(up, x[0], 0, scale_grad_by_freq=True),
    "masked_scatter": lambda x, i, up: x.masked_scatter(x > 0, x.flip(0)),
}


@pytest.mark.parametrize("name", READS)
def test_reads(name):
    assert_like_eager(READS[name], X, NEGATIVE, UP)


@pytest.mark.parametrize("name", [n for n in READS if n != "masked_scatter"])
def test_gradients_of_reads(name):
    assert_like_eager(gradient(READS[name]), X, NEGATIVE, UP)


@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.filterwarnings("ignore:scatter_reduce:UserWarning")
def test_scatter_reduce(reduce, include_self, dtype):
    def fn(x, src, up):
        return x.scatter_reduce(1, up, src, reduce, include_self=include_self)

    assert_like_eager(fn, (X[0] * 3).to(dtype), (X[1] * 3).to(dtype), UP)


@pytest.mark.filterwarnings("ignore:scatter_reduce:UserWarning")
def test_nan_wins_a_maximum():
    x = torch.zeros(2, 6).index_fill(1, torch.tensor(1), torch.nan)
    assert_like_eager(lambda x, up: x.scatter_reduce(1, up, x[:, 2:5] + 1, "amax"), x, UP)


WRITES = {
    "put": lambda x, i, up: x.index_put((i,), x.flip(0) * 2),
    "accumulate_repeated": lambda x, i, up: x.index_put((up,), x[0], accumulate=True),
    "bool_accumulates_as_or": lambda x, i, up: (x > 0).index_put((up,), x[0] > 1, accumulate=True),
    "fill_negative": lambda x, i, up: x.index_fill(1, -up[0], 2.0),
    "index_add": lambda x, i, up: x.index_add(0, up[1], x[:3], alpha=2),
    "index_copy": lambda x, i, up: x.index_copy(2, up[0], x[..., :3]),
    "index_reduce": lambda x, i, up: x.index_reduce(0, up[1], x[1:], "mean", include_self=False),
    "scatter_value": lambda x, i, up: x[0].scatter(1, up, 7.0),
    "scatter_multiply": lambda x, i, up: x[0].scatter(1, up, x[1], reduce="multiply"),
    "mask_scalar": lambda x, i, up: x.index_put((x > 0,), x[0, 0, 0]),
    "mask_rows": lambda x, i, up: x.index_put((x[:, 0, 0] > 0,), x[0, 0]),
    "mask_accumulates": lambda x, i, up: x.index_put((x > 0,), x[0, 0, 0], accumulate=True),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter:UserWarning")
def test_writes(name):
    assert_like_eager(WRITES[name], X, NEGATIVE, UP)


def test_a_mask_behind_a_whole_dimension():
    def fn(x):
        return torch.ops.aten.index_put(x, [None, x[0, :, 0] > 0], x[:, :1])

    assert_like_eager(fn, X)


def test_many_bfloat16_additions_are_summed_in_float32():
    def fn(x, index):
        return torch.zeros_like(x[:2]).index_put((index,), x, accumulate=True)

    x, index = torch.ones(4000, dtype=torch.bfloat16), torch.zeros(4000, dtype=torch.int64)
    (result,) = run(fn, x, index)
    assert result.tolist() == [4000, 0]


def _refusal(fn, *args):
    gm, _ = capture(fn, *args)
    (node,) = [n for n in gm.graph.nodes if "index" in str(n.target)]
    return registry.lookup(node.target).when(node)


def test_masks_that_decide_a_shape_or_an_order_are_refused():
    mask = X > 0
    values = torch.ones(int(mask.sum()))
    put = lambda x, mask, values: x.index_put((mask,), values)  # noqa: E731
    assert "depends on the data" in _refusal(put, X, mask, values)
    assert "depends on the data" in _refusal(lambda x, mask: x[mask], X, mask)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bags_with_an_empty_bag_and_padding(mode):
    def fn(w, indices, offsets):
        op = torch.ops.aten._embedding_bag_forward_only
        return op(
            w, indices, offsets, False, ("sum", "mean", "max").index(mode), False, None, False, 3
        )[0]

    indices, offsets = torch.tensor([1, 2, 0, 3, 3, 1]), torch.tensor([0, 2, 2, 5])
    assert_like_eager(fn, X[0], indices, offsets)
