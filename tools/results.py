"""Writes what benchmark runs found into the pages that ask for it, and their charts.

python tools/results.py
python tools/results.py --check

Results of `dynamo-backends bench` are kept as docs/results/NAME.json. A page, README.md or one of
docs/, asks for one by a comment; what stands from there to the next one is written anew:

    <!-- results: NAME backends -->
    <!-- until here -->

docs/measured has the results of single programs of benchmarks/ and tools/; the page gets the table
that the program prints of them, for those that have a function `published`:

    <!-- measured: NAME -->
    <!-- until here -->

"measured: NAME summary" leaves out the rows of single models: what remains of a table are its
geometric means, or nothing if it has none.

"backends" is a line per backend, "models" one per model, "means" a sentence and one line in all;
"choices" says how often autotune chose which candidate; "rates" counts what passes, with the
reasons of what does not and what was not run. docs/results/NAME.svg is the chart of each file that
has times. --check writes nothing and says which pages and charts are not what their results say.
"""

import argparse
import importlib
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from dynamo_backends.bench import rendering, saved_run
from dynamo_backends.bench.cells import Run
from dynamo_backends.bench.markdown_tables import TABLES, caption, chart, conditions
from dynamo_backends.bench.results_files import ResultError

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tools")]  # whose programs write the tables
END = "<!-- until here -->"
_PLACE = re.compile(rf"^(<!-- results: (\S+) (\w+) -->\n)(.*?)^({END})$", re.S | re.M)
_MEASURED = re.compile(rf"^(<!-- measured: (\S+)( summary)? -->\n)(.*?)^({END})$", re.S | re.M)
_PROGRAM = re.compile(r"\b(?:benchmarks|tools)/(\w+)\.py")


class PageError(Exception):
    """A page asks for what there is not; the message says for what."""


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Writes pages and charts; returns 1 if something is old under --check, or is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="only say what is old")
    settings = parser.parse_args(arguments)
    folder = root / "docs" / "results"
    try:
        made = dict(rendered(root, folder))
    except (PageError, ResultError) as error:
        print(error, file=sys.stderr)
        return 1
    old = [path for path, text in made.items() if not _holds(path, text)]
    for path in old:
        print(f"{path.relative_to(root)} is {'old' if settings.check else 'written'}")
        if not settings.check:
            path.write_text(made[path], encoding="utf-8")
    return int(bool(old) and settings.check)


def rendered(root: Path, folder: Path) -> list[tuple[Path, str]]:
    """Pages and charts with what they have to be.

    Raises:
        PageError: A page asks for what there is not.
        ResultError: A file of results cannot be read.
    """
    runs = {path.stem: saved_run.read(path) for path in sorted(folder.glob("*.json"))}
    timed = {name: run for name, run in runs.items() if not run.context.get("accuracy")}
    found = [(folder / f"{name}.svg", chart(run)) for name, run in timed.items()]
    for page in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        if _PLACE.search(text) or _MEASURED.search(text):
            made = _PLACE.sub(_filling(page, runs), text)
            found.append((page, _MEASURED.sub(_measured(page, root / "docs" / "measured"), made)))
    return found


def _measured(page: Path, folder: Path) -> Callable[[re.Match[str]], str]:
    def fill(place: re.Match[str]) -> str:
        begin, name, short, _, end = place.groups()
        try:
            content = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
            *_, program = _PROGRAM.findall(content["command"])  # the last: others run that one
            tables = importlib.import_module(program).published(content)
            facts = content.get("environment", {}) | content.get("context", {})
            said = conditions(facts, content["command"], _link(page, f"measured/{name}.json"))
        except (OSError, ValueError, LookupError, TypeError, ImportError, AttributeError) as error:
            raise PageError(
                f"{page.name} asks for docs/measured/{name}.json, which has to be results of a "
                f"program of benchmarks/ or tools/ with a function `published`, and to name it as "
                f"its command: {type(error).__name__}: {error}"
            ) from error
        parts = [_summarized(part) if short else _as_markdown(part) for part in tables]
        return f"{begin}\n{said}\n\n{''.join(parts)}\n{end}"

    return fill


def _summarized(part: Table | str) -> str:
    """Returns a part as Markdown without the rows of single models."""
    head, rule, *rows = _as_markdown(part).splitlines() or ["", ""]
    if not head.startswith("|"):
        return _as_markdown(part)
    means = [row for row in rows if "| geometric mean |" in row]
    return "".join(f"{line}\n" for line in (head, rule, *means)) if means else ""


def _as_markdown(part: Table | str) -> str:
    """Returns a table, also one that is Markdown already, or a line of a list."""
    if isinstance(part, str) and part.startswith("|"):
        return f"{part}\n"
    if isinstance(part, str):
        return f"\n- {part}." if not part.endswith(".") else f"\n- {part}"
    cells = [[_plain(cell) for cell in column.cells] for column in part.columns]
    head = [_plain(column.header) for column in part.columns]
    right = [n for n, column in enumerate(part.columns) if column.justify == "right"]
    words = max(right[0], 1) if right else 1  # a table that aligns nothing begins with a name
    return rendering.table(head, list(zip(*cells, strict=True)), words)


def _plain(cell: Any) -> str:
    """A cell without rich's styles."""
    text = Text.from_markup(cell) if isinstance(cell, str) else cell
    return " ".join(str(text).split())


def _filling(page: Path, runs: dict[str, Run]) -> Callable[[re.Match[str]], str]:
    """Fills a page's places in their order; only the first of a run says how it was measured."""
    told: set[str] = set()

    def fill(place: re.Match[str]) -> str:
        begin, name, kind, _, end = place.groups()
        if name not in runs or kind not in TABLES:
            raise PageError(
                f"{page.name} asks for {kind!r} of {name!r}; there are {', '.join(TABLES)} of "
                f"docs/results/{{{','.join(runs)}}}.json."
            )
        file = _link(page, f"results/{name}.json")
        said = "Of the same run:" if name in told else caption(runs[name], file)
        told.add(name)
        return f"{begin}\n{said}\n\n{TABLES[kind](runs[name])}\n{end}"

    return fill


def _link(page: Path, file: str) -> str:
    """Returns the path of a file of docs/ as the page has to write it."""
    return f"docs/{file}" if page.name == "README.md" else file


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
