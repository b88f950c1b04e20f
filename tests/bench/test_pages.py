"""Pages: whole, self-contained, small, sortable, and nothing of a result becomes markup."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from dynamo_backends.bench.cells import Run
from dynamo_backends.bench.comparison import compare_runs
from dynamo_backends.bench.dot_plots import WIDTH, panels
from dynamo_backends.bench.pages import comparison_page, run_page
from tests.bench.html import EVIL, Page, check_alone, needs_chromium, opened
from tests.bench.made_up import failing, passing, run_of


def large() -> Run:
    """As many models and backends as the huggingface list has."""
    return run_of(
        {
            (f"Model{i}ForMaskedLM", f"backend_{j}"): passing(1 + 0.2 * j, seed=10 * i + j)
            for i in range(28)
            for j in range(6)
        }
    )


@pytest.fixture(scope="module")
def mixed() -> Run:
    return run_of(
        {
            ("first", "x"): passing(1.5),
            ("second", "x"): failing("fail_to_run", EVIL),
            ("first", "y"): passing(0.001),
            ("second", "y"): failing("eager_two_runs_differ", stage="eager"),
        }
    )


def test_a_page_stands_alone(mixed: Run):
    for text in (run_page(mixed), comparison_page(compare_runs(mixed, mixed))):
        check_alone(text)
        assert 'content="width=device-width, initial-scale=1"' in text
    assert WIDTH <= 400


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_and_sorts_it(mixed: Run, scheme: str, tmp_path: Path):
    said = opened(run_page(mixed), tmp_path, scheme)
    assert said["console"] == []
    assert said["scheme"] == scheme
    assert said["ground"] == {"light": "rgb(252, 252, 251)", "dark": "rgb(22, 24, 27)"}[scheme]
    assert said["wide"] <= 0, "tables scroll, the page does not"
    assert said["flat"] == 0
    assert said["sorted"] == ["1|1 / 1|1 / true", "x|x|y|y / y|y|x|x / true"]


def test_it_says_the_result_the_reasons_the_environment_and_the_command(mixed: Run):
    text = run_page(mixed)
    words = " ".join("".join(Page(text).texts).split())
    assert "y passes 1 of 1 models and is 0.00" in words
    assert "x: 1 of 2, 1.49 times." in words
    assert f"fail_to_run second x inference float32: {EVIL}" in words
    assert "eager_two_runs_differ second y" in words
    assert "a processor, 2 torch threads, torch 2.13.0. Measured 2026-11-25." in words
    assert "dynamo-backends bench models.py:models" in words


def test_every_cell_of_a_table_can_be_sorted_by_its_value(mixed: Run):
    text = run_page(mixed)
    table = text.split('id="models"')[1].split("</table>")[0]
    heads = re.findall(r"<button>([^<]+)</button>", table.split("</thead>")[0])
    rows = re.findall(r"<tr>(.*?)</tr>", table.split("<tbody>")[1], re.S)
    assert len(rows) == 4
    values = [re.findall(r'data-v="([^"]*)"', row) for row in rows]
    assert {len(v) for v in values} == {len(heads)}
    speedups = [v[heads.index("speedup")] for v in values]
    assert sum(x == "" for x in speedups) == 2, "what is unknown has no value"
    assert sorted(round(float(x), 3) for x in speedups if x)[0] == pytest.approx(0.001, rel=0.1)


def test_a_large_page_is_less_than_two_megabytes():
    text = run_page(large())
    assert len(text.encode()) < 2_000_000
    page = Page(text)
    assert len(page.all("svg", "viewbox")) == 28
    assert sum(d.count("M") for d in page.all("path", "d")) == 28 * 6 * 20


def test_dots_lie_within_their_panel_and_ticks_apart(mixed: Run):
    first, second = panels(mixed)
    assert (first.title, second.title) == ("first", "second")
    for line in first.lines:
        xs = [float(x) for x in re.findall(r"M([\d.]+)", line.dots)]
        assert len(xs) == 20
        assert all(0 < x < WIDTH for x in xs)
        assert line.low is not None
        assert line.middle is not None
        assert line.high is not None
        assert 0 < line.low <= line.middle <= line.high < WIDTH
        assert line.y < first.height - 16
    assert first.lines[0].middle is not None
    assert first.lines[0].middle > first.one, "faster than eager is to the right"
    places = [x for x, _ in first.ticks]
    assert all(b - a >= 30 for a, b in pairwise(places))
    assert "1×" in [text for _, text in first.ticks]
    assert [line.failed for line in second.lines] == [True, True]
    assert second.summary == "x: fail_to_run; y: eager_two_runs_differ"


def test_a_run_without_results_has_a_page():
    assert "Nothing has been measured yet." in run_page(run_of({}))
