"""What the operator database with extreme values calls wrong."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dynamo_backends.conformance.operators import database, running
from dynamo_backends.conformance.operators.extremes import extreme_difference, integers, variants

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("expected", "result", "wrong"),
    [
        ([1.0, NAN], [1.0, NAN], None),
        ([1.0, NAN], [1.0, 2.0], "output 0 is a number where eager is NaN"),
        ([1.0, INF], [1.0, -INF], "output 0 is -inf where eager is inf"),
        ([1.0, NAN], [1.1, NAN], "output 0 differs from eager by up to 1.000e-01"),
        ([1.0, 0.0], [1.0, -0.0], "output 0 has zeros of the other sign"),
    ],
)
def test_each_extreme_counts(expected: list[float], result: list[float], wrong: str | None):
    e, r = torch.tensor(expected), torch.tensor(result)
    assert extreme_difference([e], [r], [e.double()], signs=True) == wrong


def test_what_eager_and_the_reference_do_not_agree_on_is_open():
    e, p = torch.tensor([NAN, 0.0, INF]), torch.tensor([INF, -0.0, 1.0], dtype=torch.float64)
    for right in (e, p.float()):
        assert extreme_difference([e], [right], [p], signs=True) is None
    assert extreme_difference([e], [torch.zeros(3)], [p], signs=True) is not None


def test_a_number_is_right_within_its_last_place():
    e, p = torch.tensor([NAN, 1.0]), torch.tensor([NAN, 1.0], dtype=torch.float64)
    unit = torch.finfo(torch.bfloat16).eps
    for units, wrong in ((1, False), (4, True)):
        r = torch.tensor([NAN, 1.0 + units * unit])
        found = extreme_difference([e.bfloat16()], [r.bfloat16()], [p], signs=True)
        assert (found is not None) == wrong


@pytest.mark.parametrize("name", ["gather", "_unsafe_masked_index", "_segment_reduce.offsets"])
def test_extremes_are_planted_where_eager_takes_them(name: str):
    op = database.find(name)
    samples = list(op.sample_inputs("cpu", torch.float32, requires_grad=False))[:2]

    def accepted(sample: object) -> bool:
        return running.is_accepted(op, sample)

    unchecked = op.name in database.UNCHECKED
    planted = list(variants(samples, accepted, checks=not unchecked))
    assert len(planted) == 8
    held = torch.cat([s.input.reshape(-1) for s in planted])
    assert held.isnan().any()
    assert held.isinf().any()
    for sample in planted if unchecked else ():
        numbers = [x for x in tree_leaves((sample.args, sample.kwargs)) if isinstance(x, Tensor)]
        assert all((x.long().abs() < 100).all() for x in numbers)


def test_integers_have_bounds_and_what_no_float_holds():
    info = torch.iinfo(torch.int64)
    assert {info.min, info.max, 2**53 + 1} <= set(integers(torch.int64))
    assert info.min not in integers(torch.int64, divides=True)


def test_casts_to_integers_get_what_integers_hold(monkeypatch: pytest.MonkeyPatch):
    op = database.find("long")
    judged: list[Any] = []
    monkeypatch.setattr(
        running, "describe_mismatch", lambda call, *results: judged.append(call.flat)
    )
    for dtype in (torch.float32, torch.int32):
        running.run(op, dtype, "onnxrt", limit=1, extremes=True)
    tensors = [x for flat in judged for x in flat if isinstance(x, torch.Tensor)]
    assert all(x.isfinite().all() for x in tensors)
    assert any((x.abs() > 1000).any() for x in tensors)
