"""Gathering and scattering, against eager."""

import pytest
import torch
import torch.nn.functional as F

from dynamo_backends.xla.lowering import registry
from tests.xla.harness import capture
from tests.xla.lowering_checks import assert_like_eager, gradient

X = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0))
I = torch.tensor([3, -1, 0, -4])  # noqa: E741
UP = torch.tensor([[1, 0, 2], [2, 2, 0]])

READS = {
    "adjacent": lambda x: x[:, I, UP[0, :1]],
    "apart": lambda x: x[I, :, I],
    "broadcast": lambda x: x[I[:, None], UP[0]],
    "none_first": lambda x: x[None, :, I],
    "index_select": lambda x: x.index_select(1, UP[0]),
    "gather_partial": lambda x: x[0].gather(1, UP),
    "gather_whole": lambda x: x[0].gather(0, torch.zeros(2, 6, dtype=torch.int64)),
    "take_negative": lambda x: x.take(torch.tensor([[-1, 0], [5, -120]])),
    "embedding": lambda x: F.embedding(UP, x[0], padding_idx=2),
    "masked_scatter": lambda x: x.masked_scatter(x > 0, torch.arange(120.0)),
}


@pytest.mark.parametrize("name", READS)
def test_reads(name):
    assert_like_eager(READS[name], X)


@pytest.mark.parametrize("name", [n for n in READS if n != "masked_scatter"])
def test_gradients_of_reads(name):
    assert_like_eager(gradient(READS[name]), X)


def test_embedding_gradient_scaled_by_frequency():
    def fn(w):
        return F.embedding(UP, w, padding_idx=0, scale_grad_by_freq=True)

    assert_like_eager(gradient(fn), X[0])


@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amax", "amin"])
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_scatter_reduce(reduce, include_self, dtype):
    x, src = (X[0] * 3).to(dtype), (X[1] * 3).to(dtype)

    def fn(x, src):
        return x.scatter_reduce(1, UP, src, reduce, include_self=include_self)

    assert_like_eager(fn, x, src)


def test_nan_wins_a_maximum():
    x = torch.zeros(2, 6).index_fill(1, torch.tensor(1), torch.nan)
    assert_like_eager(lambda x: x.scatter_reduce(1, UP, torch.ones(2, 3), "amax"), x)


WRITES = {
    "put": lambda x: x.index_put((I,), torch.ones(5, 6)),
    "accumulate_repeated": lambda x: x.index_put((UP,), x[:2, :3], accumulate=True),
    "bool_accumulates_as_or": lambda x: (x > 0).index_put((UP,), x[:2, :3] > 1, accumulate=True),
    "fill_negative": lambda x: x.index_fill(1, torch.tensor([-1, 0]), 2.0),
    "index_add": lambda x: x.index_add(0, UP[1], x[:3], alpha=2),
    "index_copy": lambda x: x.index_copy(2, UP[0], x[..., :3]),
    "index_reduce": lambda x: x.index_reduce(0, UP[1], x[1:], "mean", include_self=False),
    "scatter_value": lambda x: x[0].scatter(1, UP, 7.0),
    "scatter_multiply": lambda x: x[0].scatter(1, UP, x[1], reduce="multiply"),
    "mask_scalar": lambda x: x.index_put((x > 0,), torch.tensor(2.0)),
    "mask_rows": lambda x: x.index_put((x[:, 0, 0] > 0,), torch.arange(6.0)),
    "mask_behind": lambda x: x.index_put((None, x[0, :, 0] > 0), x[:, :1]),
    "mask_accumulates": lambda x: x.index_put((x > 0,), torch.tensor(2.0), accumulate=True),
}


@pytest.mark.parametrize("name", WRITES)
def test_writes(name):
    assert_like_eager(WRITES[name], X)


def test_many_bfloat16_additions_are_summed_in_float32():
    index = torch.zeros(4000, dtype=torch.int64)

    def fn(x):
        return torch.zeros(2, dtype=x.dtype).index_put((index,), x, accumulate=True)

    x = torch.ones(4000, dtype=torch.bfloat16)
    from tests.xla.harness import run

    assert run(fn, x)[0][0] == 4000


@pytest.mark.parametrize("fn", [lambda x, m: x[m], lambda x, m: x.index_put((m,), x[0, 0])])
def test_masks_that_decide_the_shape_are_refused_with_a_reason(fn):
    x, mask = X, X[..., 0] > 0
    if fn(x, mask).shape == x.shape:
        mask, x = X > 0, X.clone()
        values = torch.randn(int(mask.sum()))
        gm, _ = capture(lambda x, m, v: x.index_put((m,), v), x, mask, values)
    else:
        gm, _ = capture(lambda x, m: torch.ops.aten.index.Tensor(x, [m]), x, mask)
    node = next(n for n in gm.graph.nodes if "index" in str(n.target))
    lowering = registry.lookup(node.target)
    assert "depends on the data" in lowering.when(node)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bags_with_an_empty_bag_and_padding(mode):
    indices, offsets = torch.tensor([1, 2, 0, 3, 3, 1]), torch.tensor([0, 2, 2, 5])

    def fn(w):
        return F.embedding_bag(indices, w, offsets, mode=mode, padding_idx=3)

    assert_like_eager(fn, X[0])
