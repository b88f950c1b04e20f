"""Writes what benchmark runs found into the pages that ask for it, and their charts.

python tools/results.py
python tools/results.py --check

Results of `dynamo-backends bench` are kept as docs/results/NAME.json. A page, README.md or one of
docs/, asks for one by a comment; what stands from there to the next one is written anew:

    <!-- results: NAME backends -->
    <!-- until here -->

"backends" is a line per backend, "models" one per model; "rates" counts what passes, with the
reasons of what does not and what was not run. docs/results/NAME.svg is the chart of each file that
has times. --check writes nothing and says which pages and charts are not what their results say.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dynamo_backends.bench import ledger
from dynamo_backends.bench.cells import Run
from dynamo_backends.bench.published import TABLES, caption, chart
from dynamo_backends.bench.results_files import ResultError

ROOT = Path(__file__).parents[1]
END = "<!-- until here -->"
_PLACE = re.compile(rf"^(<!-- results: (\S+) (\w+) -->\n)(.*?)^({END})$", re.S | re.M)


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
    runs = {path.stem: ledger.read(path) for path in sorted(folder.glob("*.json"))}
    timed = {name: run for name, run in runs.items() if not run.context.get("accuracy")}
    found = [(folder / f"{name}.svg", chart(run)) for name, run in timed.items()]
    for page in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        if _PLACE.search(text):
            found.append((page, _PLACE.sub(_filling(page, runs), text)))
    return found


def _filling(page: Path, runs: dict[str, Run]) -> Callable[[re.Match[str]], str]:
    def fill(place: re.Match[str]) -> str:
        begin, name, kind, _, end = place.groups()
        if name not in runs or kind not in TABLES:
            raise PageError(
                f"{page.name} asks for {kind!r} of {name!r}; there are {', '.join(TABLES)} of "
                f"docs/results/{{{','.join(runs)}}}.json."
            )
        return f"{begin}\n{caption(runs[name])}\n\n{TABLES[kind](runs[name])}\n{end}"

    return fill


def _holds(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
