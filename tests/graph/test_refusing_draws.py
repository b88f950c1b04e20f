"""A mode in which nothing is drawn from torch's generator."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dynamo_backends.graph.random import DrawsError, RefusingDraws

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": F.dropout,
    "rand_like": torch.rand_like,
    "in place": lambda x: x.clone().uniform_(),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "rrelu": lambda x: F.rrelu(x, training=True),
}
DRAWS_NOTHING: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, training=False),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "rrelu": lambda x: F.rrelu(x, training=False),
    "softmax": lambda x: x.softmax(-1),
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_refused_before_they_happen(name: str):
    x = torch.ones(1, 2, 3, 4)
    before = torch.get_rng_state()
    with pytest.raises(DrawsError, match="draws random numbers"), RefusingDraws():
        DRAWS[name](x)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", DRAWS_NOTHING)
def test_the_same_calls_without_randomness_run(name: str):
    x = torch.ones(1, 2, 3, 4)
    with RefusingDraws():
        result = DRAWS_NOTHING[name](x)
    torch.testing.assert_close(result, DRAWS_NOTHING[name](x))
