"""Calls that draw the same numbers each time, and none from torch's generator."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dynamo_backends.graph.seeded_draws import GlobalRngError, PrivateRngMode, with_private_rng

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": F.dropout,
    "native dropout": lambda x: torch.native_dropout(x, 0.25, True)[0],
    "feature dropout": F.dropout2d,
    "rand": lambda x: torch.rand(5) + torch.rand(3, 1),
    "rand_like": torch.rand_like,
    "randint": lambda x: torch.randint(100, (50,)),
    "randint_like": lambda x: torch.randint_like(x, 3, 100),
    "randperm": lambda x: torch.randperm(20),
    "normal": lambda x: torch.normal(x, 2.0),
    "multinomial": lambda x: torch.multinomial(x.flatten(), 5),
    "in place": lambda x: x.clone().uniform_(),
    "exponential": lambda x: x.clone().exponential_(),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
    "rrelu": lambda x: F.rrelu(-x, training=True),
    "lstm": lambda x: torch.nn.LSTM(4, 4, num_layers=2, dropout=0.5)(x[0])[0],
}
DRAWS_NOTHING: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, training=False),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "rrelu": lambda x: F.rrelu(x, training=False),
    "softmax": lambda x: x.softmax(-1),
}


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "enable_grad"])
@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_from_a_generator_of_their_own(name: str, mode: str):
    x = torch.ones(1, 20, 30, 4)
    before = torch.get_rng_state()
    with getattr(torch, mode)():
        with PrivateRngMode() as first:
            one = DRAWS[name](x)
        with PrivateRngMode():
            two = DRAWS[name](x)
        with PrivateRngMode(seed=1):
            other = DRAWS[name](x)
    assert first.has_drawn
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_are_those_of_torch_s_generator(name: str):
    x = torch.ones(1, 20, 30, 4)
    torch.manual_seed(3)
    expected = DRAWS[name](x)
    with PrivateRngMode(seed=3):
        assert torch.equal(DRAWS[name](x), expected)


def test_each_call_of_a_function_draws_the_same():
    draw = with_private_rng(lambda args: [F.dropout(args[0])])
    x = torch.ones(50)
    assert torch.equal(draw([x])[0], draw([x])[0])


@pytest.mark.parametrize("name", DRAWS_NOTHING)
def test_the_same_calls_without_randomness_run(name: str):
    x = torch.ones(1, 2, 3, 4)
    with PrivateRngMode() as draws:
        result = DRAWS_NOTHING[name](x)
    torch.testing.assert_close(result, DRAWS_NOTHING[name](x))
    assert not draws.has_drawn


def test_what_draws_from_a_generator_of_the_program_is_refused():
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    with pytest.raises(GlobalRngError, match="draws random numbers"), PrivateRngMode():
        torch.ones(3).uniform_(generator=generator)
    assert torch.equal(before, generator.get_state())
