"""The figures of the code base, on a package with planted cycles and a long function."""

from pathlib import Path

import pytest

from tests.bench.programs import load

house = load("tools/house.py")

FILES = {
    "__init__.py": "",
    "a.py": "import toy.b\n",
    "b.py": "from toy import c\n",
    "c.py": "from toy.a import x\n",
    "later.py": "def f():\n    from toy import other\n",
    "other.py": "from . import later\nfrom toy.inner import y\n",
    "inner/__init__.py": "y = 1\n",
    "inner/typed.py": "import typing\nif typing.TYPE_CHECKING:\n    from ..hint import z\n",
    "hint.py": "from toy.inner.typed import w\nimport torch\n",
    "long.py": "def long():\n" + "    x = 1\n" * 40 + "def short():\n" + "    x = 1\n" * 39,
}


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / "toy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "toy" / name).write_text(text)
    return tmp_path / "toy"


def test_cycles_are_told_apart_by_when_the_imports_happen(toy: Path):
    modules = house.read(toy)
    loaded, called, checked = (house.cycles(modules, list(house.WHEN)[:n]) for n in (1, 2, 3))
    assert loaded == [["toy.a", "toy.b", "toy.c"]]
    assert called == [*loaded, ["toy.later", "toy.other"]]
    assert checked == [loaded[0], ["toy.hint", "toy.inner.typed"], called[1]]


def test_sizes(toy: Path):
    lines = list(house.report(toy))
    assert lines[:4] == [
        "94 lines in 10 files",
        "median file 2 lines",
        "longest file 81 lines: toy.long",
        "94 lines of code",
    ]
    assert "1 of 3 functions have more than 40 lines" in lines
    assert "  41 toy.long.long" in lines
    assert "1 import cycles when modules are loaded, of 3 modules" in lines


def test_what_may_belong_to_where_it_is_used(toy: Path):
    (toy / "c.py").write_text(
        '"""Three functions,\nof which one is used twice."""\n\nfrom toy.a import x\n\n\n'
        "def _once():\n    # Why.\n    return 1\n\n\n"
        "def _twice(f=_once()):\n    return f\n\n\n"
        "y = _twice(_twice())\n"
    )
    lines = list(house.report(toy))
    assert "99 lines of code" in lines
    assert "  1 toy.a, of toy.c" in lines
    assert "1 of 2 private functions are used once (50%)" in lines


def test_this_package_has_figures_and_no_import_cycles():
    lines = list(house.report(house.ROOT / "dynamo_backends"))
    assert int(lines[0].split()[0]) > 50_000
    assert [line for line in lines if "import cycles" in line] == [
        "0 import cycles when modules are loaded",
        "0 import cycles or functions called",
        "0 import cycles or types checked (TYPE_CHECKING)",
    ]
