"""`list` and `doctor` in terminals of several widths."""

import pytest

import dynamo_backends
from dynamo_backends.cli.doctor import diagnose
from dynamo_backends.cli.main import main
from dynamo_backends.interface.registry import get_backend, list_backends


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
    words = {word for line in lines for word in line.split()}
    for check in diagnose():
        assert any(line.split()[:1] == [check.status] and check.name in line for line in lines)
        assert words.issuperset(check.detail.split())
        for command in filter(None, check.remedy.split("; ")):
            assert f"    {command}" in lines


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
