"""Figures on pages are those of the results in the repository."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dynamo_backends.bench import saved_run
from dynamo_backends.bench.cells import Run
from dynamo_backends.bench.markdown_tables import (
    TABLES,
    backends_table,
    caption,
    chart,
    models_table,
)
from dynamo_backends.bench.pages import run_page
from tests.bench.html import needs_chromium, opened
from tests.bench.made_up import failing, passing, run_of
from tests.bench.programs import load


@pytest.fixture
def run() -> Run:
    return run_of(
        {
            ("first", "x"): passing(2.0, noise=0),
            ("first", "y"): passing(1.0, noise=0),
            ("second", "x"): passing(0.5, noise=0),
            ("second", "y"): failing("timeout"),
        }
    )


@pytest.fixture
def root(tmp_path: Path, run: Run) -> Path:
    (tmp_path / "docs" / "results").mkdir(parents=True)
    saved_run.save(run, tmp_path / "docs" / "results" / "made.json")
    place = "before\n<!-- results: made models -->\n<!-- until here -->\nafter\n"
    (tmp_path / "README.md").write_text(place)
    (tmp_path / "docs" / "other.md").write_text("nothing\n")
    return tmp_path


def test_tables_say_what_the_run_does(run: Run):
    lines = models_table(run).splitlines()
    assert lines[0] == "| model | eager ms | `x` | `y` |"
    assert lines[2:] == [
        "| first | 10 | 2.00 | 1.00 |",
        "| second | 10 | 0.50 | timeout |",
        "| geometric mean |  | 1.00 | 1.00 |",
    ]
    first, second = backends_table(run).splitlines()[2:]
    assert first.startswith("| `x` | 2/2 | 100.0% | 1.00 | 0.50 second |")
    assert second.startswith("| `y` | 1/2 | 50.0% | 1.00 |")
    said = "Measured on 2026-11-25 by `dynamo-backends bench models.py:models` on a processor"
    found = caption(run, "results/made.json")
    assert found.startswith(said)
    assert "(torch 2.13.0" in found
    assert found.endswith("[results with all versions](results/made.json)).")


def test_pages_say_what_a_backend_chose():
    run = run_of(
        {
            ("first", "x"): passing(2.0, noise=0),
            ("first", "tuned"): passing(2.0, noise=0, chosen=("x", "x", "y")),
            ("second", "tuned"): passing(4.5, noise=0, chosen=("y",)),
        }
    )
    lines = models_table(run).splitlines()
    assert lines[0] == "| model | eager ms | `x` | `tuned` | chosen by `tuned` |"
    assert lines[2:] == [
        "| first | 10 | 2.00 | 2.00 | x (2), y |",
        "| second | 10 |  | 4.50 | y |",
        "| geometric mean |  | 2.00 | 3.00 |  |",
    ]
    sentence, _, *line = TABLES["means"](run).splitlines()
    assert sentence.startswith("tuned passes 2 of 2 models and is 3.00 times as")
    assert line == ["| `x` | `tuned` |", "| --: | --: |", "| 2.00 | 3.00 |"]
    said = "tuned chose, counted by graphs: x 2, y 2; counted by models: y 2, x 1."
    assert TABLES["choices"](run) == said
    assert said in run_page(run)


def test_a_chart_is_a_picture_with_a_dot_for_each_model(run: Run):
    picture = ElementTree.fromstring(chart(run))
    assert picture.tag == "{http://www.w3.org/2000/svg}svg"
    paths = [e.attrib["d"] for e in picture.iter() if e.tag.endswith("path")]
    assert [d.count("M") for d in paths] == [2, 1]
    assert "prefers-color-scheme: dark" in chart(run)


def test_pages_are_written_once_and_checked(root: Path, capsys: pytest.CaptureFixture[str]):
    tool = load("tools/results.py")
    assert tool.main(["--check"], root) == 1
    assert "README.md is old" in capsys.readouterr().out
    assert tool.main([], root) == 0
    text = (root / "README.md").read_text()
    assert text.startswith("before\n<!-- results: made models -->\n\nMeasured on 2026-11-25")
    assert text.endswith("| 1.00 |\n\n<!-- until here -->\nafter\n")
    assert tool.main(["--check"], root) == 0
    (root / "README.md").write_text(text.replace("2.00", "3.00"))
    assert tool.main(["--check"], root) == 1, "a figure was typed"


def test_a_page_that_asks_for_what_is_not_there_is_named(
    root: Path, capsys: pytest.CaptureFixture[str]
):
    (root / "docs" / "other.md").write_text("<!-- results: lost models -->\n<!-- until here -->\n")
    assert load("tools/results.py").main([], root) == 1
    assert "other.md asks for 'models' of 'lost'" in capsys.readouterr().err


def test_the_pages_of_this_repository_are_what_their_results_say():
    assert load("tools/results.py").main(["--check"]) == 0


@needs_chromium
def test_a_browser_shows_a_chart(run: Run, tmp_path: Path):
    page = f"<!doctype html><html><head><title></title></head><body>{chart(run)}</body></html>"
    said = opened(page, tmp_path)
    assert (said["console"], said["flat"]) == ([], 0)


def test_a_page_takes_the_table_of_a_single_benchmark(
    root: Path, capsys: pytest.CaptureFixture[str]
):
    tool, folder, page = (
        load("tools/results.py"),
        root / "docs" / "measured",
        root / "docs/other.md",
    )
    page.write_text("<!-- measured: steps -->\n<!-- until here -->\n")
    assert tool.main([], root) == 1
    assert "other.md asks for docs/measured/steps.json" in capsys.readouterr().err
    command = "python benchmarks/on_avx2.py benchmarks/training.py"
    speedups = {"eager": [1, 1, 1], "compile_step openxla": [1.5, 1.4, 1.625]}
    times = {"eager": 30, "compile_step openxla": 20}
    row = {"name": "lstm", "milliseconds": times, "speedups": speedups, "gflop": 1, "peak": 100}
    facts = {"date": "2026-11-27", "processor": "a processor", "torch_threads": 2, "python": "3.11"}
    content = {"context": {**facts, "backends": ["openxla"], "precision": "float32"}}
    content |= {"kind": "training steps", "command": command, "results": {"lstm": row}}
    folder.mkdir()
    (folder / "steps.json").write_text(json.dumps(content))
    assert tool.main([], root) == 0
    lines = page.read_text().splitlines()
    assert lines[2].startswith(f"Measured on 2026-11-27 by `{command}` on a processor")
    assert lines[6] == "| lstm | 30.0 | failed | 20.0 1.50 [1.40, 1.62] | 3.00 |"
    assert lines[8] == "- compile_step openxla over eager: geometric mean 1.50, lowest 1.50."
    assert tool.main(["--check"], root) == 0
    page.write_text("<!-- measured: steps summary -->\n<!-- until here -->\n")
    assert tool.main([], root) == 0
    assert page.read_text().splitlines()[3:6] == ["", *lines[7:9]], "without the rows of models"
