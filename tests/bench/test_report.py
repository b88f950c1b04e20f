import io
import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness import (
    Accuracy,
    Compiled,
    Ratio,
    Result,
    Timing,
    environment,
    report,
    results_table,
    save_json,
    table,
)


def result(model: str, speedup: float, passed: bool = True, backend: str = "b") -> Result:
    return Result(
        model,
        backend,
        eager=Timing("eager", (0.002, 0.002), Ratio(1, 1, 1)),
        timing=Timing("b", (0.002 / speedup,) * 2, Ratio(speedup, 0.9 * speedup, 1.1 * speedup)),
        accuracy=Accuracy(passed, 1e-6, 1e-7, "" if passed else "output 0 is wrong"),
        compiled=Compiled(print, backend, 1.5, 1, []),
        error="" if passed else "output 0 is wrong",
    )


def rendered(results: list[Result]) -> str:
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(results_table("title", results))
    return console.export_text()


def test_table_has_times_ratio_and_verdict() -> None:
    text = rendered([result("net", 2.0), result("other", 0.5, passed=False)])
    (line,) = [line for line in text.splitlines() if "net" in line]
    assert line.split() == [
        "net",
        "2.00",
        "1.00",
        "2.00",
        "[1.80,",
        "2.20]",
        "1.0e-06",
        "1",
        "?",
        "?",
        "1.5",
        "yes",
    ]
    (line,) = [line for line in text.splitlines() if "other" in line]
    assert line.split()[-1] == "NO"


def test_table_names_backends_if_there_are_several() -> None:
    one, other = result("net", 2.0, backend="first"), result("net", 2.0, backend="second")
    text = rendered([one, other])
    assert "first" in text
    assert "second" in text
    assert "first" not in rendered([one])


def test_failed_backend_has_a_line() -> None:
    text = rendered([Result("net", "b", error="RuntimeError: no")])
    (line,) = [line for line in text.splitlines() if "net" in line]
    assert line.split() == ["net", *["-"] * 8, "NO"]


def test_json_round_trips_with_its_environment(tmp_path: Path) -> None:
    file = tmp_path / "new" / "results.json"
    save_json(file, "inference", [{"ratio": 2.0}], settings={"batch": 4})
    content = json.loads(file.read_text())
    assert content["kind"] == "inference"
    assert content["settings"] == {"batch": 4}
    assert content["environment"].items() > environment().items()
    assert len(content["environment"].pop("date")) == len("2026-11-27")
    assert content["command"].startswith("python ")
    assert content["results"] == [{"ratio": 2.0}]


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    save_json(file, "inference", [1])
    before = file.read_text()
    with pytest.raises(TypeError):
        save_json(file, "inference", [object()])
    assert file.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


def test_words_of_a_table_are_at_the_left_and_numbers_at_the_right() -> None:
    made = table(("model", "kind", "ms"), [("net", "x", "1.0"), ("other", "y")], "title", left=2)
    assert [column.justify for column in made.columns] == ["left", "left", "right"]
    assert [list(column.cells) for column in made.columns][2] == ["1.0", ""]


@pytest.mark.parametrize("name", [None, "results.json"])
def test_what_is_printed_is_what_a_page_shows(name: str | None, tmp_path: Path) -> None:
    def published(content: Mapping[str, Any]) -> list[str]:
        return [f"{content['kind']}: {content['results']} of {content['settings']['model']}"]

    console = Console(width=120, file=io.StringIO(), record=True)
    file = str(tmp_path / name) if name else None
    report(published, Namespace(model="net", json=file), "times", [1, 2], console)
    assert console.export_text() == "times: [1, 2] of net\n"
    if file:
        content = json.loads(Path(file).read_text())
        assert published(content) == ["times: [1, 2] of net"]
        assert content["settings"] == {"model": "net"}
    assert len(list(tmp_path.iterdir())) == bool(file)
