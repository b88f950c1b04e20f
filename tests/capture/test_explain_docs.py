"""The example in docs/explain.md prints what the page says."""

import re
import runpy
from pathlib import Path

import pytest

from tests.pages import examples, given, run

PAGE = Path(__file__).parents[2] / "docs" / "explain.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def steady(text: str) -> str:
    """The report without what differs from run to run and from version to version."""
    text = text.split("\nGuards\n")[0].strip()
    stages = r"\n      seconds of each stage:.*?(?=\n    \S|\n      for |\n\n)"
    text = re.sub(stages, "", text, flags=re.DOTALL)
    return re.sub(r"\d+ guards|\d+\.\d\d s\b", "#", text)


def test_the_call_prints_a_report():
    first = next(examples(PAGE.read_text(encoding="utf-8")))
    report = run(first, given())
    assert report.startswith("Sequential with openxla: 1 graph, ")


def test_the_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (program,) = [code for code in blocks("python") if "Explainer" in code]
    (report,) = blocks("text")
    monkeypatch.chdir(tmp_path)
    Path("example.py").write_text(program)
    runpy.run_path("example.py")
    assert steady(capsys.readouterr().out) == steady(report)
