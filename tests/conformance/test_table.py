"""docs/conformance.md: made of the sweeps in docs/operators/; a new one leaves the others."""

import json
from collections import Counter
from pathlib import Path

from dynamo_backends.conformance.outcomes import Outcome
from tests.conformance import table
from tests.conformance.test_opinfo import BACKENDS

OUTCOMES = [
    Outcome("sin", "float32", 2, "native", seconds=1.234),
    Outcome("svd", "float32", 1, "fallback", Counter({"aten.svd: a | b": 1})),
    Outcome("svd", "float64", 1, "fallback", Counter({"aten.svd: a | b": 1})),
    Outcome("eye", "float32", 0, "no samples"),
]
SWEEP = table.Sweep("onnxrt", "onnxrt", "-k onnxrt --samples 3", limit=3)


def test_the_page_is_what_the_sweeps_found():
    assert (table.DOCS / table.PAGE).read_text(encoding="utf-8") == table.page()


def test_every_backend_that_is_swept_is_on_the_page():
    page = table.page()
    for name in [*BACKENDS, "openxla, gradients"]:
        assert f"\n| {name} | float32 |" in page
        assert f"\n### {name}\n" in page


def test_a_sweep_is_kept_and_on_the_page(tmp_path: Path):
    table.write(OUTCOMES, SWEEP, tmp_path)
    page = (tmp_path / table.PAGE).read_text(encoding="utf-8")
    assert page.count("| onnxrt |") == 2
    assert "\n| onnxrt | float32 | 2 | 3 | 1 | 1 | 0 | 0 | 50.0% |\n" in page
    assert "\nEvery operator on at most 3 of its sample inputs, with onnxruntime " in page
    assert "\n| svd | float32, float64 | aten.svd: a \\| b |\n" in page
    assert 'by `make conformance ARGS="-k onnxrt --samples 3"` on ' in page
    assert "(operators/onnxrt.json)" in page
    kept = json.loads((tmp_path / "operators" / "onnxrt.json").read_text(encoding="utf-8"))
    assert [Outcome.from_dict(row).name for row in kept["results"]] == ["sin", "svd", "svd"]
    assert kept["results"][0]["seconds"] == 1.2
    assert kept["environment"]["date"]
    assert kept["environment"]["versions"]["onnxruntime"]


def test_a_new_sweep_leaves_the_others(tmp_path: Path):
    other = table.Sweep("openxla, gradients", "openxla", "-k gradients")
    table.write(OUTCOMES, other, tmp_path)
    table.write(OUTCOMES[1:], SWEEP, tmp_path)
    table.write(OUTCOMES, SWEEP, tmp_path)
    page = (tmp_path / table.PAGE).read_text(encoding="utf-8")
    for sweep in (SWEEP, other):
        assert page.count(f"\n| {sweep.name} | float32 | 2 | ") == 1
    assert page.index("\n### onnxrt\n") < page.index("\n### openxla, gradients\n")
    assert sorted(path.name for path in (tmp_path / "operators").iterdir()) == [
        "onnxrt.json",
        "openxla-gradients.json",
    ]
