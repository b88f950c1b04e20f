"""Dtypes, precision, random numbers."""

from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from dynamo_backends.conformance.comparing import ensure
from dynamo_backends.conformance.registering import Table
from dynamo_backends.conformance.subject import OwnRandomNumbersError, Subject
from dynamo_backends.verify.mismatch import describe_nonfinite_mismatch

CHECKS = Table()


def _named(*dtypes: torch.dtype) -> dict[str, torch.dtype]:
    return {str(dtype).removeprefix("torch."): dtype for dtype in dtypes}


@CHECKS.each(
    _named(
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128,
    )
)  # fmt: skip
def dtypes_are_kept(subject: Subject, value: torch.dtype) -> None:
    """Results have eager's dtypes."""
    x = torch.tensor([0, 1, 3, 100]).to(value)
    subject.check(lambda x: (x, x == 1, x.reshape(2, 2).flip(0), torch.cat([x, x])), x)


@CHECKS.add
def numbers_of_64_bits_are_not_truncated(subject: Subject) -> None:
    """Checks integers and floats of 64 bits."""
    big = torch.tensor([2**40 + 1, -(2**50) - 3])
    subject.check(lambda x: (x + 1, x * 2, x // 3), big)
    tiny = torch.tensor([1 + 2.0**-40, 1.0], dtype=torch.float64)
    found = subject.compile(lambda x: x - 1)(tiny)[0].item()
    ensure(found == 2.0**-40, f"{found} instead of {2.0**-40}")


@CHECKS.each(_named(torch.float16, torch.bfloat16, torch.float64))
def models_in_other_precisions(subject: Subject, value: torch.dtype) -> None:
    """Checks a small net in other precisions."""
    module = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    with torch.no_grad():
        subject.check(module.to(value).eval(), torch.randn(5, 16, dtype=value))


@CHECKS.each(
    {
        "arithmetic": lambda x: (x * 2 + 1, x.exp(), x.amax(1), x.sum(0), x - x),
        "activations": lambda x: (x * 2 + 1, x.relu(), x.amax(1), x.exp(), x.softmax(-1)),
    }
)
def not_a_number_and_infinities(subject: Subject, value: Any) -> None:
    """NaN and infinities go where eager lets them go."""
    x = torch.tensor([[torch.nan, 1.0, -2.0], [inf, -inf, 3.0]])
    subject.check(value, x)
    for i, (result, expected) in enumerate(zip(subject.compile(value)(x), value(x), strict=True)):
        wrong = describe_nonfinite_mismatch(expected, result)
        ensure(not wrong, f"output {i} {wrong}")


def _draws(x: Tensor) -> tuple[Tensor, ...]:
    a = dropout(x * 2, 0.5, training=True)
    b = torch.rand(3, 4) + torch.rand_like(x)
    return a, b, dropout(a + 1, 0.3, training=True)


@CHECKS.add
def random_numbers_differ_between_calls(subject: Subject) -> None:
    """A seed gives the same ones again."""
    x, compiled = torch.randn(3, 4), subject.compile(_draws)
    compiled(x)
    torch.manual_seed(3)
    first, second = compiled(x), compiled(x)
    ensure(not torch.equal(first[1], second[1]), "two calls draw the same numbers")
    torch.manual_seed(3)
    again = all(map(torch.equal, first, compiled(x)))
    ensure(again, "a seed does not give the same numbers again")


@CHECKS.add
def random_numbers_equal_eagers(subject: Subject) -> None:
    """After the same seed, in each call."""
    x, compiled = torch.randn(3, 4), subject.compile(_draws)
    torch.manual_seed(3)
    found = compiled(x), compiled(x)
    torch.manual_seed(3)
    expected = _draws(x), _draws(x)
    for ours, theirs in zip(found, expected, strict=True):
        for o, t in zip(ours, theirs, strict=True):
            ensure((o.shape, o.dtype) == (t.shape, t.dtype), "shape or dtype is not eager's")
            if not torch.allclose(o, t, rtol=1e-6, atol=0):
                raise OwnRandomNumbersError("random numbers are not eager's")
