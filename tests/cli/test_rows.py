"""`list` and `doctor` in terminals of several widths."""

import json

import pytest

import dynamo_backends
from dynamo_backends.autotune.decisions import DecisionStore
from dynamo_backends.cli import doctor
from dynamo_backends.cli.doctor import Check, diagnose
from dynamo_backends.cli.main import main
from dynamo_backends.interface.registry import get_backend, list_backends
from tests.autotune.test_decisions import decision


@pytest.mark.parametrize("width", [60, 80, 200])
def test_list_has_a_line_for_each_backend(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if not line.startswith(" ")][1:]
    for name, line in zip(list_backends(), rows, strict=False):
        assert line.split()[0] == name
        assert len(line) <= width
        found = get_backend(name).availability()
        assert line.split()[1] == ("yes" if found.usable else "no")
        assert_below(lines, line, "" if found.usable else found.reason, width)
        for command in found.remedy.split("; ") if not found.usable else ():
            assert f"    {command}" in lines
        assert width < 200 or get_backend(name).summary in line


@pytest.mark.parametrize("width", [60, 80, 200])
def test_doctor_breaks_no_word(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("missing, and what adds it")
    words = {word.rstrip(";,:") for line in lines for word in line.split()}
    for check in diagnose():
        assert words.issuperset(word.rstrip(";,:") for word in check.detail.split())
        if check.status == "missing":
            assert words.issuperset(check.name.split())
        else:
            assert any(line.split()[:1] == ["ok"] and check.name in line for line in lines[:at])
        for command in filter(None, check.remedy.split("; ")):
            assert lines[at:].count(f"    {command}") == 1


def test_doctor_begins_with_one_line_and_groups_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [
        Check("backend a", "ok", "1.0"),
        Check("backend b", "missing", "no b", "pip install b"),
        Check("b on GPU", "missing", "no GPU; no b", "buy one; pip install b"),
        Check("backend c", "broken", "ImportError: c", "pip install c"),
    ]
    monkeypatch.setattr(doctor, "diagnose", lambda: checks)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "1 of 3 backends usable; broken: backend c",
        "status  what",
        "ok      backend a  1.0",
        "broken  backend c  ImportError: c",
        "    pip install c",
        "missing, and what adds it",
        "    pip install b",
        "        backend b, b on GPU: no b",
        "    buy one",
        "        b on GPU: no GPU",
    ]
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[1]["remedy"] == "pip install b"


def test_lists_are_whole_at_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    inputs = ("float32[128, 1024, 16, 16]", "float32[128, 1024, 16, 16]")
    DecisionStore().put(decision("a" * 64, inputs=inputs))
    for command in (["list"], ["cache", "ls"]):
        assert main(command) == 0
        out = capsys.readouterr().out
        assert "…" not in out
        assert all(len(line) <= 80 for line in out.splitlines() if "/" not in line)
    assert "a" * 12 in out
    assert ", ".join(inputs) in out


def assert_below(lines: list[str], line: str, text: str, width: int) -> None:
    """Text stands below a line, wrapped between words."""
    words: list[str] = []
    for each in lines[lines.index(line) + 1 :]:
        if not each.startswith(" "):
            break
        if len(words) < len(text.split()):
            assert len(each) <= width
            words += each.split()
    assert words == text.split()


def test_the_version(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"dynamo-backends {dynamo_backends.__version__}\n"
