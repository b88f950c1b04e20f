"""Which differences from eager the operator database with extreme values does not call wrong."""

import re
from pathlib import Path

import pytest
import torch

from dynamo_backends._torch_private.testing import op_db
from dynamo_backends.conformance.operators import database, differences, running
from dynamo_backends.conformance.operators.differences import (
    DECLARED,
    ENDS_AT_LARGEST,
    LOSES_NAN,
    SPREADS_NAN,
    ZERO_SIGNS,
    Difference,
    Kind,
)
from tests.conformance.test_opinfo import BACKENDS

NAN, INF = float("nan"), float("inf")
LARGEST = torch.finfo(torch.float32).max


def _bullets() -> list[str]:
    text = (Path(__file__).parents[2] / "docs" / "differences.md").read_text(encoding="utf-8")
    return re.findall(r"^- \*\*(.+?)\*\*", text, flags=re.MULTILINE)


@pytest.mark.parametrize("row", DECLARED, ids=lambda row: f"{row.backend}-{row.bullet}")
def test_what_is_declared_is_documented_and_exists(row: Difference):
    assert row.bullet in _bullets()
    assert row.backend in BACKENDS
    assert set(row.operators) <= {database.full_name(op) for op in op_db}


@pytest.mark.parametrize(
    ("kind", "eager", "result", "excused"),
    [
        (LOSES_NAN, [NAN, NAN, 1.0], [2.0, NAN, 3.0], [NAN, NAN, 3.0]),
        (SPREADS_NAN, [1.0, INF, NAN, 2.0], [NAN, NAN, 1.0, 3.0], [1.0, INF, 1.0, 3.0]),
        (
            ENDS_AT_LARGEST,
            [INF, -INF, INF, 1.0, -INF],
            [LARGEST, -LARGEST, -INF, LARGEST, 1.0],
            [INF, -INF, -INF, LARGEST, 1.0],
        ),
        (ZERO_SIGNS, [0.0, -0.0, 0.0], [-0.0, 0.0, 1.0], [0.0, -0.0, 1.0]),
    ],
)
def test_only_elements_of_the_kind_are_excused(
    kind: Kind, eager: list[float], result: list[float], excused: list[float]
):
    row = Difference("onnxrt", kind, "", ())
    (found,) = differences.mask_declared_differences(
        [row], [torch.tensor(eager)], [torch.tensor(result)]
    )
    torch.testing.assert_close(found, torch.tensor(excused), rtol=0, atol=0, equal_nan=True)
    assert found.signbit().tolist() == torch.tensor(excused).signbit().tolist()


def test_positions_may_be_others_where_values_may_or_are_nan():
    row = Difference("onnxrt", LOSES_NAN, "", ())
    expected = [torch.tensor([NAN, 2.0, NAN]), torch.tensor([3, 4, 5])]
    results = [torch.tensor([1.0, 2.0, NAN]), torch.tensor([6, 7, 8])]
    assert differences.mask_declared_differences([row], expected, results)[1].tolist() == [3, 7, 5]


def test_nothing_is_excused_without_an_extreme_or_elsewhere():
    numbers, extreme = torch.ones(3), torch.tensor([1.0, NAN, 2.0])
    pool = "nn.functional.max_pool2d"
    assert differences.declared("onnxrt", pool, [numbers, 2]) == []
    assert differences.declared("onnxrt", pool, [extreme, 2]) != []
    assert differences.declared("openxla", pool, [extreme, 2]) == []
    assert differences.declared("onnxrt", "sin", [extreme, 2]) == []
    backward = "max_pool2d_with_indices_backward"
    assert differences.declared("onnxrt", backward, [torch.tensor([INF])]) == []
    assert differences.declared("onnxrt", backward, [extreme]) != []


def test_a_declared_difference_is_counted_and_another_one_found(monkeypatch: pytest.MonkeyPatch):
    op = database.find("nn.functional.max_pool2d")
    found = running.run(op, torch.float32, "onnxrt", limit=1, extremes=True)
    assert found.status == "declared"
    assert found.declared == ["NaN through activations and maximum pools."]
    monkeypatch.setattr(differences, "DECLARED", ())
    assert running.run(op, torch.float32, "onnxrt", limit=1, extremes=True).status == "wrong"
