"""How far from eager a candidate may be that computes in bfloat16."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dynamo_backends.autotune.trial_inputs import TrialInputs
from dynamo_backends.autotune.verification import VerificationCase, autocast_bfloat16
from dynamo_backends.workers.race import Run

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(32, 64, generator=GENERATOR)
W = torch.randn(64, 16, generator=GENERATOR)


def product(args: list[Tensor]) -> Sequence[Tensor]:
    return [args[0] @ args[1]]


def small_difference(args: list[Tensor]) -> Sequence[Tensor]:
    """What bfloat16 makes of it is mostly error: the product, less most of itself."""
    return [args[0] @ args[1] - args[2]]


def trial_of(original: Run, *extra: Tensor) -> VerificationCase:
    return VerificationCase(TrialInputs([X, W, *extra], (), ()), original, original)


def test_gradients_may_have_other_strides_than_eagers():
    """Autograd gives a parameter's gradient the strides of the parameter."""

    def transposed(args: list[Tensor]) -> Sequence[Tensor]:
        return [r.t().contiguous().t() for r in both(args)]

    def both(args: list[Tensor]) -> Sequence[Tensor]:
        return [args[0] * 2, args[1] * 3]

    def half(args: list[Tensor]) -> Sequence[Tensor]:
        return [args[0] * 2, transposed(args)[1]]

    def smaller(args: list[Tensor]) -> Sequence[Tensor]:
        return [args[0] * 2, args[1][:5] * 3]

    given = TrialInputs([X, W], (), ())
    strict, loose = (
        VerificationCase(given, both, both),
        VerificationCase(given, both, both, outputs=1),
    )
    assert "output 1 has strides (1, 64)" in strict.verify_candidate(half).wrong
    assert loose.verify_candidate(half).is_right
    assert "output 0 has strides (1, 32)" in loose.verify_candidate(transposed).wrong
    assert "output 1 is float32[5, 16]" in loose.verify_candidate(smaller).wrong


def off_by(share: float) -> Run:
    """The product, with random errors that are so much of autocast's."""
    precise = X.double() @ W.double()
    with autocast_bfloat16():
        error = float((X @ W - precise).square().mean().sqrt())
    signs = torch.randn(precise.shape, generator=GENERATOR, dtype=torch.float64).sign()
    return lambda args: [(precise + share * error * signs).float()]


def test_bfloat16_may_err_as_much_as_autocast_does():
    trial = trial_of(product)
    assert trial.verify_candidate(off_by(1.5), reduced=True).is_right
    assert "differs from eager" in trial.verify_candidate(off_by(5), reduced=True).wrong


def test_float32_may_not():
    verdict = trial_of(product).verify_candidate(off_by(0.1))
    assert "differs from eager" in verdict.wrong


def test_what_is_precise_passes_also_as_bfloat16():
    verdict = trial_of(product).verify_candidate(product, reduced=True)
    assert verdict.is_right
    assert verdict.error < 1e-6


def test_bfloat16_is_refused_where_it_loses_the_result():
    trial = trial_of(small_difference, (X @ W) * (1 - 1e-3))

    def in_bfloat16(args: list[Tensor]) -> Sequence[Tensor]:
        with autocast_bfloat16():
            return [small_difference(args)[0].float()]

    verdict = trial.verify_candidate(in_bfloat16, reduced=True)
    assert "is too large even for bfloat16" in verdict.wrong


def test_where_autocast_fails_results_must_be_precise():
    def original(args: list[Tensor]) -> Sequence[Tensor]:
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("not in this precision")
        return product(args)

    trial = trial_of(original)
    assert trial.verify_candidate(original, reduced=True).is_right
    assert not trial.verify_candidate(off_by(1), reduced=True).is_right


def test_integers_must_be_equal_in_bfloat16_too():
    def original(args: list[Tensor]) -> Sequence[Tensor]:
        return [product(args)[0].argmax(1)]

    trial = trial_of(original)
    assert trial.verify_candidate(original, reduced=True).is_right
    other = trial.verify_candidate(lambda args: [original(args)[0].flip(0)], reduced=True)
    assert "elements" in other.wrong
