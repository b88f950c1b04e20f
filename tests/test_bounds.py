"""To which bounds sizes are rounded up."""

import math

import pytest
import sympy

from dynamo_backends.interface.protocols import BucketRule
from dynamo_backends.pipeline.shapes.buckets import (
    BucketRounding,
    PaddingDemand,
    Sizes,
    named_bounds,
    padding_ratio,
    round_up,
)

B, N = sympy.symbols("b n")


def sizes(batch: int, length: int) -> Sizes:
    return {B: batch, N: length}


def rounding(growth: float = 1.1, **named: tuple[int, ...]) -> BucketRounding:
    return BucketRounding(BucketRule(growth, 3), {B: None, N: 100}, named)


@pytest.mark.parametrize("growth", [1.01, 1.1, 1.25, 1.5, 2, 3.7, 8])
def test_bounds_are_in_order_and_grow(growth: float):
    bounds = sorted({round_up(n, growth) for n in range(2000)})
    assert bounds[0] == 2
    assert all(round_up(b, growth) == b for b in bounds), "a bound is its own"
    assert all(round_up(n, growth) >= n for n in range(2000))
    assert all(b - a <= max((growth - 1) * a, 4) + 4 for a, b in zip(bounds, bounds[1:]))  # noqa: B905, RUF007


def test_bounds_stay_below_what_guards_allow():
    assert rounding().nearest_bounds(sizes(3, 97)) == sizes(3, 100)
    assert rounding().wide_bounds(sizes(3, 97)) == sizes(4, 100)
    assert rounding().wide_bounds(sizes(5, 12)) == sizes(8, 16)


def test_the_user_names_bounds():
    rule = rounding(n=(16, 40))
    assert [rule.nearest_bounds(sizes(3, n)) for n in (9, 17, 41)] == [
        sizes(3, 16),
        sizes(3, 40),
        sizes(3, 48),
    ]
    assert rule.wide_bounds(sizes(3, 9)) == sizes(4, 16)
    alone = rounding(1, b=(4,), n=(16, 40))
    assert alone.nearest_bounds(sizes(3, 9)) == sizes(4, 16)
    assert alone.nearest_bounds(sizes(3, 41)) is None
    assert alone.wide_bounds(sizes(5, 9)) is None
    assert rounding(1, n=(16,)).nearest_bounds(sizes(3, 9)) is None, "of the other there are none"


def test_which_symbols_are_meant():
    inputs = {"ids": ("s0", "s1"), "mask": ("", "s1"), "x": ("s2", "")}
    assert named_bounds([4, 8], inputs) == {"s0": (4, 8), "s1": (4, 8), "s2": (4, 8)}
    assert named_bounds({"ids": {1: [4]}, "x": {-2: [6], 1: [7]}}, inputs) == {
        "s1": (4,),
        "s2": (6,),
    }


def test_waste():
    assert padding_ratio(sizes(4, 16), sizes(2, 16)) == 2
    assert padding_ratio(sizes(4, 16), sizes(5, 2)) == math.inf
    assert padding_ratio(sizes(2, 2), sizes(0, 2)) == 2


def test_what_spares_most_is_made_first():
    demand = PaddingDemand(rounding(), 1.1)
    there = [sizes(8, 100)]
    for each in (sizes(8, 50), sizes(8, 49), sizes(2, 3)):
        demand.note_sizes(each)
    first = demand.find_best_bounds(there, ())
    assert first == sizes(8, 56), "two of the largest"
    second = demand.find_best_bounds([*there, first], ())
    assert second == sizes(2, 3)
    assert demand.find_best_bounds([*there, first], {(2, 3)}) is None
    assert demand.find_best_bounds([*there, first, second], ()) is None


def test_what_is_narrow_enough_is_not_asked_for():
    demand = PaddingDemand(rounding(), 2.0)
    for each in (sizes(8, 50), sizes(7, 60)):
        demand.note_sizes(each)
        assert demand.is_narrow_enough(sizes(8, 100), each)
    assert demand.find_best_bounds([sizes(8, 100)], ()) is None
    assert demand.find_best_bounds([sizes(2, 100)], ()) is None, "none serves them"


def test_bounds_serve_sizes_of_different_calls():
    demand = PaddingDemand(rounding(), 1.1)
    demand.note_sizes(sizes(6, 10))
    demand.note_sizes(sizes(3, 12))
    assert demand.find_best_bounds([sizes(8, 100)], ()) == sizes(6, 12)


def test_many_dimensions_are_no_matter():
    symbols = sympy.symbols("a:9")
    rule = BucketRounding(BucketRule(1.1, 3), dict.fromkeys(symbols), {})
    demand = PaddingDemand(rule, 1.1)
    for k in range(8):
        demand.note_sizes({s: 8 + (k * 7 + i * 5) % 40 for i, s in enumerate(symbols)})
    assert demand.find_best_bounds([dict.fromkeys(symbols, 64)], ()) is not None
