"""Runs tests with several versions of Python, torch and jax; docs/versions.md says what passed.

python tools/matrix.py [--python python3.12] [--torch 2.14.1 --torch 2.15.0] [--jax 0.10.0] [TEST]
python tools/matrix.py --page

Each combination gets an environment of its own (`make venv`), which is kept, and a row in
docs/versions.json, which replaces an earlier one of the same combination. Interpreters that are not
there are left out; what cannot be installed is noted, and which backends could not run in an
environment, for the tests of those are skipped. --page only writes the page.
"""

import argparse
import datetime
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
DATA, PAGE = ROOT / "docs/versions.json", ROOT / "docs/versions.md"

PYTHONS = ("python3.11", "python3.12", "python3.13")
TORCHES = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
JAXES = ("",)
TESTS = (
    "tests/test_autoload.py",
    "tests/test_registration.py",
    "tests/test_semantics.py",
    "tests/test_ranges.py",
    "tests/capture",
    "tests/graph",
    "tests/runtime",
    "tests/training/test_gradients.py",
    "tests/aot/record",
    "tests/aot/test_step_crashes.py",
    "tests/aot/test_step_safety.py",
    "tests/aot/test_step_training.py",
    "tests/xla/test_runtime.py",
    "tests/package/test_export.py",
    "tests/package/test_package.py",
    "tests/models/test_every_backend.py",
)
"""What touches torch's or Python's private names, and each backend once. All tests: `tests`."""

HEAD = """# Versions that were tested

The package admits Python 3.11 and newer, torch 2.11 and newer, and jax 0.10 to 0.12
(`pyproject.toml`). Every change is tested with the versions in `constraints.txt`. `make matrix`
runs tests with others, each combination in an environment of its own, and writes this page:

    make matrix ARGS="--torch 2.15.0 --python python3.12"   # one combination, a share of the tests
    make matrix ARGS="--torch 2.15.0 tests"                 # all tests, with each Python there is

"""
LACKS = """
## What the environments lacked

Tests of these backends were skipped, or ran with a double of the vendor's package.

"""
NOTHING = "No run has been recorded yet.\n"


@dataclass(frozen=True)
class Cell:
    """One combination of versions such as "3.12", "2.15.0", and "": jax's of constraints.txt."""

    python: str
    torch: str
    jax: str = ""

    @property
    def folder(self) -> str:
        """The folder of its environment."""
        return f".venv-py{self.python}-torch{self.torch}" + (f"-jax{self.jax}" * bool(self.jax))


@dataclass(frozen=True)
class Row:
    """What became of one combination.

    Attributes:
        date: When, as in ISO 8601.
        tests: What was run.
        passed: How many tests did; failed and skipped alike.
        reason: Why nothing was run; empty if something was.
        lacks: The backends that could not run, each with the reason.
    """

    python: str
    torch: str
    jax: str
    date: str
    tests: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    reason: str = ""
    lacks: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[tuple[int, ...], ...]:
        """The combination, in the order of the page."""
        return tuple(map(numbers, (self.python, self.torch, self.jax)))


def numbers(version: str) -> tuple[int, ...]:
    """A version as numbers, to be sorted: "2.15.0" comes after "2.9.1"."""
    return tuple(map(int, re.findall(r"\d+", version)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is asked for; returns 1 if anything failed."""
    settings = _parse(arguments)
    rows = [] if settings.page else list(_run(settings))
    merged = replaced(read(DATA), rows)
    DATA.write_text(json.dumps([asdict(r) for r in merged], indent=2) + "\n", encoding="utf-8")
    PAGE.write_text(page(merged), encoding="utf-8")
    return int(any(row.failed or row.reason for row in rows))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tests", nargs="*", metavar="TEST", help="files or folders of tests")
    for name, what in (("python", "an interpreter"), ("torch", "a version"), ("jax", "a version")):
        parser.add_argument(f"--{name}", action="append", help=f"{what}; may be repeated")
    parser.add_argument("--workers", type=int, default=2, help="processes that run tests")
    parser.add_argument("--page", action="store_true", help="only write the page")
    return parser.parse_args(arguments)


def _run(settings: argparse.Namespace) -> Iterable[Row]:
    tests = settings.tests or list(TESTS)
    pythons = settings.python or PYTHONS
    interpreters = {version: path for path in pythons if (version := _version(path))}
    for cell in cells(interpreters, settings.torch or TORCHES, settings.jax or JAXES):
        print(f"== Python {cell.python}, torch {cell.torch}, jax {cell.jax or 'pinned'}")
        name = "all" if tests == ["tests"] else " ".join(settings.tests) or "a share"
        yield _tested(cell, interpreters[cell.python], tests, name, settings.workers)


def cells(pythons: Iterable[str], torches: Iterable[str], jaxes: Iterable[str]) -> list[Cell]:
    """All combinations."""
    return [Cell(*each) for each in itertools.product(pythons, torches, jaxes)]


def _version(interpreter: str) -> str:
    """Which Python an interpreter is; empty if it is not there."""
    if shutil.which(interpreter) is None:
        return ""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    told = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=False)
    return told.stdout.strip() if told.returncode == 0 else ""


def _tested(cell: Cell, interpreter: str, tests: Sequence[str], name: str, workers: int) -> Row:
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    row = (cell.python, cell.torch, cell.jax, date, name)
    if reason := _installed(cell, interpreter):
        return Row(*row, reason=reason)
    python = str(ROOT / cell.folder / "bin" / "python")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [python, "-m", "pytest", "-n", str(workers), f"--junitxml={report}", *tests]
        subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
        if not report.exists():
            return Row(*row, reason="pytest did not finish")
        return Row(*row, *counts(report.read_text(encoding="utf-8")), lacks=_lacking(python))


def _installed(cell: Cell, interpreter: str) -> str:
    """Makes the environment of a combination; returns why that failed, or nothing."""
    versions = (f"PYTHON={interpreter}", f"TORCH={cell.torch}", f"JAX={cell.jax}")
    make = ["make", "-C", str(ROOT), f"VENV={cell.folder}", *versions, "venv"]
    done = subprocess.run(make, stderr=subprocess.PIPE, text=True, check=False)
    sys.stderr.write(done.stderr)
    return why_not_installed(done.stderr) if done.returncode else ""


def why_not_installed(errors: str) -> str:
    """What pip or make say of it, in one line."""
    found = re.search(r"^ERROR: (.+)$", errors, re.MULTILINE)
    return f"could not be installed: {found[1]}" if found else "could not be installed"


def _lacking(python: str) -> dict[str, str]:
    command = [python, "-m", "dynamo_backends.cli", "list", "--json"]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return lacking(json.loads(told.stdout))


def lacking(listed: dict[str, Any]) -> dict[str, str]:
    """The backends that cannot run, each with the reason; given what the command `list` prints."""
    return {b["name"]: b["detail"] for b in listed["backends"] if not b["usable"]}


def counts(report: str) -> tuple[int, int, int]:
    """How many tests passed, failed and were skipped, by pytest's report in JUnit's form."""
    suites = list(ElementTree.fromstring(report).iter("testsuite"))
    total, failures, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites)
        for name in ("tests", "failures", "errors", "skipped")
    )
    return total - failures - errors - skipped, failures + errors, skipped


def read(path: Path) -> list[Row]:
    """The rows that a file has."""
    if not path.exists():
        return []
    return [Row(**values) for values in json.loads(path.read_text(encoding="utf-8"))]


def replaced(rows: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """Rows in the order of the page; new ones take the place of old ones of their combination."""
    by_key = {row.key: row for row in (*rows, *new)}
    return [by_key[key] for key in sorted(by_key)]


def page(rows: Sequence[Row]) -> str:
    """The text of docs/versions.md."""
    if not rows:
        return HEAD + NOTHING
    lines = ["| Python | torch | jax | tests | result | when |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {r.python} | {r.torch} | {r.jax or 'as pinned'} | {r.tests} | {_result(r)} | {r.date} |"
        for r in rows
    ]
    return HEAD + "\n".join(lines) + "\n" + "".join(_lacks(rows))


def _lacks(rows: Sequence[Row]) -> Iterator[str]:
    """What was missing, each with the combinations in which it was."""
    where: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for backend, reason in row.lacks.items():
            reason = re.sub(r"torch \d\S*", "torch", reason)
            where.setdefault((backend, reason), []).append(f"{row.python} with {row.torch}")
    if where:
        yield LACKS
        yield "| backend | why it could not run | Python with torch |\n|---|---|---|\n"
    everywhere = [f"{row.python} with {row.torch}" for row in rows if not row.reason]
    for (backend, reason), places in sorted(where.items()):
        shown = "all" if places == everywhere else ", ".join(places)
        yield f"| `{backend}` | {reason} | {shown} |\n"


def _result(row: Row) -> str:
    if row.reason:
        return row.reason
    failed = f"**{row.failed} failed**, " if row.failed else ""
    return f"{failed}{row.passed} passed, {row.skipped} skipped"


if __name__ == "__main__":
    sys.exit(main())
