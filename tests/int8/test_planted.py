"""Wrong scales, wrong zero points and saturating sums are never chosen, and never used."""

from typing import Any

import pytest
import torch
from torch import Tensor

import dynamo_backends
from dynamo_backends import GraphReport, compiler
from dynamo_backends.int8.proven import IN_FLOAT
from dynamo_backends.interface.errors import VerificationError
from tests.int8.planted import FAULTS, FIRST, batches, net

TOLERANCES: dict[str, dict[Any, float]] = {
    "cosine": {"cosine": 0.99},
    "relative": {"relative": 0.05},
}


def compiled_by(backend: str, x: Tensor, **options: Any) -> tuple[Tensor, GraphReport]:
    given = {"calibration": batches(), "precision": "int8", **options}
    with torch.no_grad(), dynamo_backends.record() as reports:
        run = torch.compile(net(), backend=compiler(backend), options=given)
        run(x)
        result = run(x)
    (report,) = reports
    return result, report


def eager(x: Tensor) -> Tensor:
    with torch.no_grad():
        return net()(x)


@pytest.fixture
def x() -> Tensor:
    return torch.rand(16, 64, generator=torch.Generator().manual_seed(5)) + 0.5


@pytest.mark.usefixtures("plant")
@pytest.mark.parametrize("tolerance", TOLERANCES)
def test_what_is_right_is_used(x: Tensor, tolerance: str):
    result, report = compiled_by("planted_int8", x, tolerance=TOLERANCES[tolerance])
    assert not torch.equal(result, eager(x)), "it is not computed in int8"
    torch.testing.assert_close(result, eager(x), rtol=0.05, atol=0.05)
    assert report.events == []
    assert report.verified == 2, "the held-out batches and the first call"
    (measured,) = report.measured.items()
    assert measured[0] == tolerance


@pytest.mark.plants_errors
@pytest.mark.usefixtures("plant")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("tolerance", TOLERANCES)
def test_what_is_wrong_runs_in_eager(x: Tensor, fault: str, tolerance: str):
    result, report = compiled_by(f"planted_{fault}", x, tolerance=TOLERANCES[tolerance])
    assert torch.equal(result, eager(x))
    (event,) = report.events
    assert event.kind == "wrong"
    assert "on 2 held-out batches" in event.reason


@pytest.mark.usefixtures("plant")
def test_the_first_products_stay_in_float_where_they_are_what_is_not_accurate(x: Tensor):
    tolerance = {"cosine": 0.99}
    result, report = compiled_by(f"planted_{FIRST}", x, tolerance=tolerance)
    assert report.in_float == IN_FLOAT[1]
    assert report.events == []
    assert not torch.equal(result, eager(x)), "the second product is not computed in int8"
    torch.testing.assert_close(result, eager(x), rtol=0.02, atol=0.02)
    given = {"calibration": batches(), "precision": "int8", "tolerance": tolerance}
    with torch.no_grad():
        text = str(dynamo_backends.explain(net(), x, backend=f"planted_{FIRST}", options=given))
    assert "the first 10% of the quantizable layers stay in float32" in " ".join(text.split())


@pytest.mark.plants_errors
@pytest.mark.usefixtures("plant")
def test_it_is_raised_where_eager_is_refused(x: Tensor):
    with pytest.raises(VerificationError, match="on 2 held-out batches"):
        compiled_by("planted_scale", x, tolerance={"cosine": 0.99}, fallback="error")


@pytest.mark.usefixtures("plant", "int8_seems_fast")
def test_autotune_chooses_what_is_right(x: Tensor):
    options = {"candidates": ["planted_int8"], "tolerance": {"cosine": 0.99}}
    result, report = compiled_by("autotune", x, **options)
    assert report.chosen == "planted_int8@int8"
    rows = {row.name: row for row in report.candidates}
    assert rows["planted_int8@int8"].measured["cosine"] > 0.999
    assert rows["planted_int8"].measured == {}
    assert not torch.equal(result, eager(x))
    assert report.tolerance == "cosine at least 0.99"


@pytest.mark.usefixtures("plant", "int8_seems_fast")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("tolerance", TOLERANCES)
def test_autotune_never_chooses_what_is_wrong(x: Tensor, fault: str, tolerance: str):
    options = {"candidates": [f"planted_{fault}"], "tolerance": TOLERANCES[tolerance]}
    result, report = compiled_by("autotune", x, **options)
    assert report.chosen in ("eager", f"planted_{fault}")
    (row,) = (row for row in report.candidates if row.name == f"planted_{fault}@int8")
    assert row.reason.startswith("wrong: ")
    assert row.reason.endswith("on 2 held-out batches")
    assert not row.chosen
    torch.testing.assert_close(result, eager(x))


@pytest.mark.usefixtures("plant", "int8_seems_fast")
def test_a_remembered_decision_is_proven_again(x: Tensor):
    """What was right when it was decided need not be any more."""
    options = {"candidates": ["planted_int8"], "tolerance": {"cosine": 0.99}}
    compiled_by("autotune", x, **options)
    torch._dynamo.reset()
    result, report = compiled_by("autotune", x, **options)
    assert report.chosen == "planted_int8@int8"
    assert report.measured["cosine"] > 0.999
    assert not torch.equal(result, eager(x))


@pytest.mark.plants_errors
@pytest.mark.usefixtures("plant", "int8_seems_fast")
def test_a_decision_that_is_wrong_now_ends_in_eager(x: Tensor, monkeypatch: pytest.MonkeyPatch):
    from dynamo_backends.interface.registry import get_backend

    options = {"candidates": ["planted_int8"], "tolerance": {"cosine": 0.99}}
    compiled_by("autotune", x, **options)
    torch._dynamo.reset()
    monkeypatch.setattr(type(get_backend("planted_int8")), "fault", "scale")
    result, report = compiled_by("autotune", x, **options)
    assert torch.equal(result, eager(x))
    assert [event.kind for event in report.events][:1] == ["wrong"]
    assert report.chosen == "eager"
