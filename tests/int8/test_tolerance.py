"""What a user admits: how it is written, and what it refuses."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dynamo_backends import OptionError
from dynamo_backends.int8.tolerance import Scores, Tolerance

E = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
NOISE = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))


def judged(bounds: dict[Any, float], *pairs: tuple[Tensor, Tensor]) -> Scores:
    scores = Scores(Tolerance.parse(bounds, "onnxrt"))
    for expected, result in pairs:
        scores.add([expected], [result])
    return scores


def test_the_cosine_is_the_mean_over_all_samples():
    other = E[:4] + 0.5 * NOISE[:4]
    scores = judged({"cosine": 0.9}, (E, E + 0.1 * NOISE), (E[:4], other))
    rows = [torch.cosine_similarity(E, E + 0.1 * NOISE), torch.cosine_similarity(E[:4], other)]
    assert math.isclose(scores.measured["cosine"], float(torch.cat(rows).mean()), rel_tol=1e-6)
    assert scores.wrong == ""


def test_a_cosine_that_is_too_small_is_refused():
    text = judged({"cosine": 0.99}, (E, E + NOISE)).wrong
    assert text.startswith("a mean cosine of 0.")
    assert text.endswith("is below the tolerance of 0.99")


@pytest.mark.parametrize(("times", "said"), [(2, "100.0% longer"), (0.5, "50.0% shorter")])
def test_a_wrong_scale_changes_no_angle_and_is_refused(times: float, said: str):
    scores = judged({"cosine": 0.99}, (E, times * E))
    assert math.isclose(scores.measured["cosine"], 1.0, rel_tol=1e-6)
    assert f"result vectors are {said} than eager's on average" in scores.wrong


def test_the_relative_error_is_that_of_all_batches_together():
    scores = judged({"relative": 0.2}, (E, E + 0.1 * NOISE), (E, E))
    expected = float((0.1 * NOISE).norm() / torch.cat([E, E]).norm())
    assert math.isclose(scores.measured["relative"], expected, rel_tol=1e-6)
    assert scores.wrong == ""
    assert "exceeds the tolerance of 0.01" in judged({"relative": 0.01}, (E, E + NOISE)).wrong


def agreement(expected: list[Tensor], results: list[Tensor]) -> Tensor:
    """Part of the samples whose largest score is the same one."""
    return (expected[0].argmax(1) == results[0].argmax(1)).float().mean()


def test_a_function_of_the_users_judges():
    other = E.clone()
    other[0] = -other[0]
    scores = judged({agreement: 0.9}, (E, E), (E, other))
    assert scores.measured == {"agreement": (1 + 7 / 8) / 2}
    assert scores.wrong == ""
    assert judged({agreement: 0.9}, (E, other)).wrong == (
        "agreement 0.875 is below the tolerance of 0.9"
    )


def test_a_function_that_fails_admits_nothing():
    def metric(expected: list[Tensor], results: list[Tensor]) -> float:
        raise RuntimeError("no labels")

    wrong = judged({metric: 0.9}, (E, E)).wrong
    assert wrong == "the metric metric failed (RuntimeError: no labels)"


def test_a_metric_that_is_nan_admits_nothing():
    assert judged({lambda *_: math.nan: 0.9}, (E, E)).wrong.endswith(
        "is below the tolerance of 0.9"
    )


@pytest.mark.parametrize("bounds", [{"cosine": 0.01}, {"relative": 100.0}, {agreement: 0.0}])
def test_some_things_are_wrong_whatever_is_admitted(bounds: dict[Any, float]):
    spoilt = E.clone()
    spoilt[1, 2] = math.nan
    assert "NaN" in judged(bounds, (E, spoilt)).wrong
    assert "is float64[8, 32] instead of float32[8, 32]" in judged(bounds, (E, E.double())).wrong
    assert "is float32[32] instead of float32[8, 32]" in judged(bounds, (E, E[0])).wrong


def test_integers_are_equal_unless_a_function_judges():
    ints = torch.arange(8)
    text = "only a metric function can define a tolerance for them"
    assert text in judged({"cosine": 0.5}, (ints, ints + 1)).wrong
    assert judged({lambda *_: 1.0: 0.5}, (ints, ints + 1)).wrong == ""
    assert (
        judged({"cosine": 0.5}, (ints, ints)).wrong
        == "cosine cannot be computed, because there is no floating-point output"
    )


def test_zeros_and_infinities_are_no_numbers_to_divide_by():
    zeros = torch.zeros(2, 3)
    assert judged({"cosine": 0.99, "relative": 0.1}, (zeros, zeros)).wrong == ""
    assert judged({"cosine": 0.99}, (zeros, zeros + 1)).wrong
    assert judged({"relative": 0.1}, (zeros, zeros + 1)).wrong
    masked = E.clone()
    masked[:, 0] = -math.inf
    assert judged({"cosine": 0.99}, (masked, masked + 0.001)).wrong == ""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (0.99, 'must be tolerance={"cosine": 0.99}'),
        ({}, "must be tolerance="),
        ({"cosin": 0.99}, "names 'cosin'; it must be tolerance="),
        ({"cosine": 1.5}, "must be more than 0 and at most 1, not 1.5"),
        ({"relative": 0}, "must be more than 0, not 0"),
        ({"cosine": "high"}, "must be a number, not 'high'"),
        ({agreement: math.nan}, "the bound of agreement in the option 'tolerance'"),
    ],
)
def test_what_is_no_tolerance_is_said(given: Any, said: str):
    with pytest.raises(OptionError) as raised:
        Tolerance.parse(given, "onnxrt")
    assert said in str(raised.value)


def test_keys_tell_functions_apart():
    def other(expected: list[Tensor], results: list[Tensor]) -> float:
        return 0.5

    def changed(expected: list[Tensor], results: list[Tensor]) -> float:
        return 0.6

    changed.__name__ = "other"
    marks = {repr(Tolerance.parse({f: 0.9}, "ov")) for f in (other, changed, agreement)}
    assert len(marks) == 3
    assert str(Tolerance.parse({"relative": 0.05, agreement: 0.9}, "ov")) == (
        "relative at most 0.05, agreement at least 0.9"
    )
