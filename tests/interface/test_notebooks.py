"""What notebooks show of reports, decisions and comparisons."""

from html.parser import HTMLParser
from typing import Any

import torch
from torch import nn

import dynamo_backends
from dynamo_backends.autotune.decisions import DecisionStore
from dynamo_backends.bench.comparison import compare_runs
from tests.bench.made_up import passing, run_of


class Table(HTMLParser):
    """The cells of tables, by rows; checks that elements are closed in order."""

    def __init__(self, text: str):
        super().__init__()
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag != "br":
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "br":
            self.rows[-1][-1] += "\n"

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


def test_a_graphs_report_and_its_decision() -> None:
    model, x = nn.Sequential(nn.Linear(8, 16), nn.GELU()).eval(), torch.rand(3, 8)
    options = {"candidates": ["ts_trace"]}
    with torch.no_grad(), dynamo_backends.record() as reports:
        torch.compile(model, backend="autotune", options=options)(x)
    (report,) = reports
    rows = Table(report._repr_html_()).rows
    assert ["chosen", report.chosen] in rows
    assert ["candidate", "compile s", "ms", "× eager", "why not"] in rows
    assert {"ts_trace", "eager"} <= {row[0] for row in rows}
    assert not any(value in ("", "()", "[]", "{}") for _, value in (r for r in rows if len(r) == 2))
    (decision,) = DecisionStore().all()
    rows = Table(decision._repr_html_()).rows
    assert ["winner", decision.winner] in rows
    assert ["inputs", "float32[3, 8]"] in rows
    assert rows[-1][0] in ("ts_trace", "eager")


def test_what_runs_in_eager_has_its_reason() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x.sin() + 1, -1).cos() * 2

    options = {"keep_in_eager": ("aten.softmax",), "min_block_size": 1}
    with torch.no_grad(), dynamo_backends.record() as reports:
        torch.compile(function, backend="onnxrt", options=options)(torch.rand(2, 3))
    (found,) = (row for row in Table(reports[0]._repr_html_()).rows if row[0] == "fallbacks")
    assert found[1].startswith("op: aten._softmax.default, reason: ")


def test_two_runs() -> None:
    before, after = (run_of({("a<b", "x"): passing(r, seed=i)}) for i, r in enumerate((1.5, 1.0)))
    compared = compare_runs(before, after)
    text = compared._repr_html_()
    header, row = Table(text).rows
    assert header == ["", "model", "backend", "change"]
    assert row[:3] == ["regression", "a<b", "x"]
    assert "1 regression and no improvements" in text
