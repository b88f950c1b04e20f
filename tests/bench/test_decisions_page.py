"""Pages of autotune's decisions: the winner, everybody's rounds and errors, and why others lost."""

from pathlib import Path
from typing import Any

import pytest

from dynamo_backends import cli
from dynamo_backends.autotune.decisions import Decision, DecisionStore
from dynamo_backends.bench.decisions_page import decisions_page, headline
from dynamo_backends.bench.dot_plots import WIDTH, error_panel
from dynamo_backends.interface.report import CandidateReport
from tests.bench.html import EVIL, check_alone, needs_chromium, opened

_ROUNDS = tuple(0.010 + i * 1e-5 for i in range(30))


def row(name: str, ratio: float, reason: str = "", **more: Any) -> CandidateReport:
    rounds = tuple(s / ratio for s in _ROUNDS)
    given = {"compile_s": 2.0, "error": 2e-7, "seconds": rounds[0], "rounds": rounds} | more
    speedup = (ratio, ratio * 0.98, ratio * 1.02)
    return CandidateReport(name, reason, speedup=speedup, **given)


def decision(number: int = 0, winner: str = "openxla", **more: Any) -> Decision:
    rows = (
        row("openxla", 2.0, "" if winner == "openxla" else "takes 1.5 times as long"),
        row("ov", 1.3, "takes 1.54 times as long as openxla", rounds=_ROUNDS[:7]),
        row("eager", 1.0, "" if winner == "eager" else "takes 2.00 times as long", compile_s=0.0),
        CandidateReport("onnxrt", "wrong: output 0 differs", 1.0, 0.05),
        CandidateReport("tvm", f"could not be compiled: {EVIL}"),
    )
    given = {"graph": "inference", "ops": 3, "inputs": ("float32[2]",), "candidates": rows}
    given |= {"objective": "latency", "precision": "float32", "created": 5.0 + number}
    given |= {"environment": {"torch": "2.13.0", "devices": ["cpu"]}, "lines": ("m.py:3, x + 1",)}
    return Decision(f"{number:064x}", winner, **{**given, **more})


def test_one_decision_says_who_won_why_and_what_it_is_worth():
    page = check_alone(decisions_page([decision()], "dynamo-backends cache show 0"))
    said = "openxla runs the inference graph of 3 calls: 2.00 times [1.96, 2.04] as fast as eager, "
    assert said + "chosen over 4 other candidates." in page.words
    assert "takes 1.54 times as long as openxla" in page.words
    assert f"could not be compiled: {EVIL}" in page.words
    assert "400 calls" in page.words, "2 s at 5 ms a call"
    assert "onnxrt: 5.0e-02" in page.words
    for text in ("m.py:3, x + 1", "torch", "2.13.0", "dynamo-backends cache show 0", "float32[2]"):
        assert text in page.words
    dots = [d for d in page.all("path", "d") if d.count("M") > 1]
    assert [d.count("M") for d in dots] == [30, 7, 30]


def test_eager_and_memory_have_sentences_of_their_own():
    assert headline([]) == "There are no decisions yet."
    assert headline([decision(winner="eager")]).startswith("Eager runs the inference graph")
    assert "uses the least memory" in headline([decision(objective="memory")])


def test_many_decisions_are_counted_and_linked():
    found = [decision(i, "eager" if i % 3 == 0 else "openxla") for i in range(200)]
    page = check_alone(decisions_page(found, "dynamo-backends cache ls"))
    assert "200 graphs were tuned: openxla runs 133, eager runs 67." in page.words
    links = page.all("a", "href")
    assert len(links) == 60
    assert {x.removeprefix("#") for x in links} == set(page.all("section", "id"))
    assert "The newest 60 follow" in page.words


def test_errors_beyond_the_scale_stand_at_its_ends():
    panel = error_panel([("x", 0.0, False), ("y", float("inf"), True), ("z@bf16", 0.01, False)])
    assert panel is not None
    first, second, third = panel.lines
    assert 0 < first.x < first.limit < second.x < WIDTH
    assert third.x < third.limit
    assert third.limit > first.limit, "bfloat16 is allowed more"
    assert error_panel([]) is None


def test_commands_write_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DYNAMO_BACKENDS_CACHE", str(tmp_path))
    for i in range(2):
        DecisionStore().put(decision(i + 1))
    page = tmp_path / "page.html"
    assert cli.main(["cache", "ls", "--json", "--html", str(page)]) == 0
    assert "2 graphs were tuned: openxla runs 2." in check_alone(page.read_text()).words
    assert cli.main(["cache", "show", decision(2).key, "--json", "--html", str(page)]) == 0
    assert f"cache show {decision(2).key} --json" in check_alone(page.read_text()).words
    assert DecisionStore().all()[0] == decision(2), "rounds and lines are kept"


@needs_chromium
def test_a_browser_shows_and_sorts_it(tmp_path: Path):
    found = [decision(i, "eager" if i % 3 == 0 else "openxla") for i in range(4)]
    said = opened(decisions_page(found, "command"), tmp_path)
    assert (said["console"], said["flat"]) == ([], 0)
    assert said["wide"] <= 0
    assert said["sorted"][0] == "5.0|6.0|7.0|8.0 / 8.0|7.0|6.0|5.0 / true"
    assert len(said["sorted"]) == 5
