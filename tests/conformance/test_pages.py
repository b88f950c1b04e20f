"""The page of a run, docs/checked-backends.md, which summarizes some, and the look-up of checks."""

import json
from pathlib import Path
from typing import Any

import pytest

from dynamo_backends.conformance.outcomes import Check, Outcome, Status
from dynamo_backends.conformance.pages import headline, page, reasons_table
from tests.bench.programs import load

checked = load("tools/checked.py")
look_up = load("tools/look_up.py")

OUTCOMES = [
    Outcome("sin", "float32", 1, "native", seconds=2.5),
    Outcome("sort", "float32", 1).fail("wrong", "output 0 | is <3>\n instead of 4"),
    Outcome("views", samples=1, group="weights").fail("timeout", "not done after 9 s"),
    Outcome("gpt2", group="models").fail("no samples", "No module named 'transformers'"),
    Outcome("eye", "float32", 1).fail("random", "random numbers are not eager's"),
]


def run(backend: str, outcomes: list[Outcome]) -> dict[str, Any]:
    return {
        "commands": [f"dynamo-backends conformance {backend}"],
        "date": "2026-01-02",
        "context": {
            "backend": backend,
            "packages": {"torch": "2.13.0+cpu", "mine": "1.2"},
            "processor": "Zen 4",
            "python": "3.11.7",
            "samples": 1,
            "torch_threads": 1,
        },
        "not_run": ["operators/add-float32"],
        "results": [outcome.to_dict() for outcome in outcomes],
    }


def test_an_outcome_survives_json():
    for outcome in OUTCOMES:
        again = Outcome.from_dict(json.loads(json.dumps(outcome.to_dict())))
        assert again == outcome
    assert str(OUTCOMES[0].check) == "operators/sin-float32"
    assert OUTCOMES[2].check == Check("weights", "views")


def test_the_page_has_each_failure_with_its_reason():
    text = page(run("mine", OUTCOMES))
    assert text.startswith("# Conformance of mine\n\n2 of 4 checks fail: 1 wrong, 1 timeout.\n")
    assert (
        "`dynamo-backends conformance mine` on 2026-01-02: Zen 4, Python 3.11.7, torch 2.13.0, "
        "mine 1.2; one sample of" in text
    )
    assert "1 checks were not run yet." in text
    assert "It does not say which operators it leaves to eager." in text
    wrong = text.partition("## What is wrong")[2].partition("\n## ")[0]
    assert "| `operators/sort-float32` | wrong | output 0 \\| is &lt;3> instead of 4 |" in wrong
    assert "| `weights/views` | timeout | not done after 9 s |" in wrong
    assert "gpt2" not in wrong
    assert "| operators | 3 | 1 | 1 | 0 | 1 | 0 | 0 | 0 |" in text
    assert "| `operators/sin-float32` | 2.5 |" in text
    assert "leaves to eager." not in page(run("openxla", OUTCOMES))


def test_a_run_without_failures():
    assert headline(OUTCOMES[:1]) == "None of 1 checks fails."
    assert "What is wrong" not in page(run("mine", OUTCOMES[:1]))


def test_the_site_shows_the_runs_that_are_kept():
    runs, graphs = checked.runs_in(checked.DATA), checked.runs_in(checked.RANDOM_GRAPHS)
    assert {"inductor", "openvino", "openxla"} <= {checked.name(run) for run in runs}
    assert {"inductor_freezing", "onnxrt", "openxla", "ov", "tvm"} <= {
        checked.name(run) for run in graphs
    }
    page = checked.text(runs, graphs)
    assert checked.PAGE.read_text(encoding="utf-8") == page
    assert len(page.split()) < 1500, "the page is a summary"


def test_the_site_counts_random_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checked, "DATA", tmp_path)
    monkeypatch.setattr(checked, "RANDOM_GRAPHS", tmp_path / "rewrites")
    monkeypatch.setattr(checked, "PAGE", tmp_path / "page.md")
    statuses: list[Status] = [*["native"] * 17, "fallback", "fallback", "wrong", "torch"]
    graphs = [Outcome(str(i), status=status, group="rewrites") for i, status in enumerate(statuses)]
    for outcomes, name in ((OUTCOMES[:1], "openxla.json"), (graphs, "graphs.json")):
        (tmp_path / name).write_text(json.dumps(run("openxla", outcomes)))
    checked.main([str(tmp_path / "graphs.json")])
    (tmp_path / "graphs.json").unlink()
    checked.main([])
    written = (tmp_path / "page.md").read_text()
    assert "| openxla | torch 2.13.0, mine 1.2 | 21 | 1 | 0 | 0 | 0 | 1 | 85.0% |" in written
    assert "\n| backend | operators | rewrites | native | date |\n" in written
    assert "\n| [openxla](checked/openxla.json) | 0/1 | 1/20 | 1 | 2026-01-02 |\n" in written
    assert "\n| wrong | 1 | openxla 1 |\n" in written
    (kept,) = checked.runs_in(tmp_path / "rewrites")
    assert [result["name"] for result in kept["results"]] == ["19", "20"]


def test_reasons_are_counted_without_what_differs_between_calls():
    reasons = {
        "aten.sort.default: it has no lowering to XLA": 2,
        "aten.eig.default: it has no lowering to XLA": 1,
        "aten.erf.default: Lazy Tensor Core has no node for aten::erf": 1,
        "output 0 differs from eager by up to 6.071e+00": 1,
        "output 0 has strides (6, 3, 1) instead of (1, 6)": 1,
        "aten.add.Tensor: its block has 1 operators, fewer than min_block_size=3": 3,
    }
    outcomes = [("mine", Outcome("a").fail("wrong", reason)) for reason in reasons]
    outcomes += [("other", Outcome("b", status="declared", declared=["Ties."]))]
    assert reasons_table("checks", outcomes).splitlines()[2:] == [
        "| it has no lowering to XLA | 2 | mine 2 |",
        "| Lazy Tensor Core has no node for aten::… | 1 | mine 1 |",
        "| output 0 differs from eager by up to … | 1 | mine 1 |",
        "| output 0 has strides (…) instead of (…) | 1 | mine 1 |",
        "| wrong | 1 | mine 1 |",
        "| Ties. | 1 | other 1 |",
    ]
    many = [(f"b{i}", Outcome("a").fail("wrong", "no")) for i in range(6)]
    assert "| no | 6 | b0 1, b1 1, b2 1, b3 1, 2 more |" in reasons_table("checks", many)


def test_an_operator_is_looked_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    also = Outcome("sort", "int64", 1).fail("wrong", "output 0 | is <3>\n instead of 4")
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(run("mine", [*OUTCOMES, also])))
    assert look_up.main(["so*", "--files", str(path)]) == 0
    line = "mine  operators/sort  float32, int64  wrong  output 0 | is <3> instead of 4\n"
    assert capsys.readouterr().out == line
    assert look_up.main(["*", "--status", "timeout", "random", "--files", str(path)]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == [
        "weights/views",
        "operators/eye",
    ]
    assert look_up.main(["sorted", "--files", str(path)]) == 1
    assert capsys.readouterr().err == ("No result matches. Backends: mine. Names like it: sort.\n")


def test_the_results_in_docs_are_looked_up(capsys: pytest.CaptureFixture[str]):
    assert look_up.main(["linalg.svd", "--backend", "openxla", "openxla, gradients"]) == 0
    found = capsys.readouterr().out
    assert "openxla, gradients  gradients/linalg.svd  float32, float64" in found
    assert "openxla             operators/linalg.svd  float32, float64, complex64" in found
    assert found.count("aten._linalg_svd.default: ") == 2
    assert look_up.main(["89", "--backend", "tvm"]) == 0
    assert capsys.readouterr().out.startswith("tvm  rewrites/89    declared  Integers beyond 2**63")
