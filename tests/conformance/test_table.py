"""docs/conformance.md: a summary of the sweeps in docs/operators/; a new one leaves the others."""

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
    page = table.page()
    assert (table.DOCS / table.PAGE).read_text(encoding="utf-8") == page
    assert len(page.split()) < 1500, "the page is a summary"


def test_every_backend_that_is_swept_is_on_the_page():
    page = table.page()
    for name in [*BACKENDS, "openxla, gradients"]:
        assert f"\n| {name} | float32 |" in page
        assert f"\n| [{name}](operators/{name.replace(', ', '-')}.json) | " in page


def test_a_sweep_is_kept_and_on_the_page(tmp_path: Path):
    table.write(OUTCOMES, SWEEP, tmp_path)
    page = (tmp_path / table.PAGE).read_text(encoding="utf-8")
    assert page.count("| onnxrt |") == 2
    assert "\n| onnxrt | float32 | 2 | 1 | 1 | 0 | 0 | 50.0% |\n" in page
    assert "\n| a \\| b | 1 | onnxrt 1 |\n" in page  # in float32, without the call
    assert "\nWrong results and errors: 0 of 3.\n" in page
    assert "\n| [onnxrt](operators/onnxrt.json) | onnxruntime " in page
    assert " | `-k onnxrt --samples 3` | 20" in page
    assert "a part of the operators" not in page
    kept = json.loads((tmp_path / "operators" / "onnxrt.json").read_text(encoding="utf-8"))
    assert [Outcome.from_dict(row).name for row in kept["results"]] == ["sin", "svd", "svd"]
    assert kept["results"][0]["seconds"] == 1.2
    assert kept["environment"]["date"]
    assert kept["environment"]["versions"]["onnxruntime"]


def test_what_is_wrong_is_on_the_page(tmp_path: Path):
    wrong = Outcome("cos", "float64", 1).fail("wrong", "output 0 differs from eager in 2 elements")
    part = table.Sweep("onnxrt", "onnxrt", "-k onnxrt", operators="Every operator that is odd")
    table.write([*OUTCOMES, wrong], part, tmp_path)
    page = (tmp_path / table.PAGE).read_text(encoding="utf-8")
    assert "\nWrong results and errors: 1 of 4.\n" in page
    row = "| onnxrt | operators/cos-float64 | wrong | output 0 differs from eager in 2 elements |"
    assert f"\n{row}\n" in page
    assert "\n- onnxrt: every operator that is odd.\n" in page


def test_a_new_sweep_leaves_the_others(tmp_path: Path):
    other = table.Sweep("openxla, gradients", "openxla", "-k gradients")
    table.write(OUTCOMES, other, tmp_path)
    table.write(OUTCOMES[1:], SWEEP, tmp_path)
    table.write(OUTCOMES, SWEEP, tmp_path)
    page = (tmp_path / table.PAGE).read_text(encoding="utf-8")
    for sweep in (SWEEP, other):
        assert page.count(f"\n| {sweep.name} | float32 | 2 | ") == 1
    assert page.index("\n| [onnxrt](") < page.index("\n| [openxla, gradients](")
    assert "\n| a \\| b | 2 | onnxrt 1, openxla, gradients 1 |\n" in page
    assert sorted(path.name for path in (tmp_path / "operators").iterdir()) == [
        "onnxrt.json",
        "openxla-gradients.json",
    ]
