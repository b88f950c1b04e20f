"""Prints what the results of `make conformance` and tools/checked.py say of single operators.

python tools/look_up.py PATTERN ... [--backend NAME ...] [--status STATUS ...] [--files FILE ...]

python tools/look_up.py linalg.svd
python tools/look_up.py "*" --backend ltc --status fallback
python tools/look_up.py "views*" --backend openvino

A line for each backend and status: operator or check, dtypes, status, reasons. Patterns are those
of `dynamo-backends conformance --only`.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path

from dynamo_backends.conformance.outcomes import STATUSES, Outcome

DOCS = Path(__file__).parents[1] / "docs"


def kept() -> list[Path]:
    """The files of results in docs/."""
    folders = ("operators", "checked", "checked/rewrites")
    return [path for folder in folders for path in sorted((DOCS / folder).glob("*.json"))]


def read(files: Iterable[Path]) -> Iterator[tuple[str, Outcome]]:
    """Each outcome in some files, with the name of its backend or sweep."""
    for path in files:
        found = json.loads(path.read_text(encoding="utf-8"))
        name = found["sweep"]["name"] if "sweep" in found else found["context"]["backend"]
        yield from ((name, Outcome.from_dict(row)) for row in found["results"])


def lines(outcomes: Iterable[tuple[str, Outcome]]) -> list[str]:
    """A line for what differs in nothing but dtypes, in columns."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for backend, outcome in outcomes:
        check = outcome.check._replace(dtype="")
        reasons = "; ".join([*outcome.declared, *(r for r, _ in outcome.reasons.most_common())])
        reasons = " ".join(reasons.split())
        dtypes = rows.setdefault((backend, str(check), outcome.status, reasons), [])
        if outcome.dtype not in dtypes:
            dtypes.append(outcome.dtype)
    cells = [(*row[:2], ", ".join(dtypes), *row[2:]) for row, dtypes in rows.items()]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def main(given: Sequence[str]) -> int:
    """Prints the lines; returns the exit status, 1 if there are none."""
    parser = argparse.ArgumentParser(description="Results of single operators.")
    parser.add_argument("patterns", nargs="+", metavar="PATTERN", help='such as "linalg.*"')
    parser.add_argument("--backend", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--status", nargs="+", choices=STATUSES, metavar="STATUS",
                        help=f"default: all of {', '.join(STATUSES)}")  # fmt: skip
    parser.add_argument("--files", nargs="+", type=Path, metavar="FILE",
                        help="JSON of other results (default: those in docs/)")  # fmt: skip
    args = parser.parse_args(given)
    everything = list(read(args.files or kept()))
    found = [
        (backend, outcome)
        for backend, outcome in everything
        if any(fnmatch(outcome.name, pattern) for pattern in args.patterns)
        and (not args.backend or backend in args.backend)
        and (not args.status or outcome.status in args.status)
    ]
    if not found:
        names = {outcome.name for _, outcome in everything}
        close = [name for pattern in args.patterns for name in get_close_matches(pattern, names)]
        near = f" Names like it: {', '.join(close)}." if close else ""
        backends = "; ".join(dict.fromkeys(backend for backend, _ in everything))
        print(f"No result matches. Backends: {backends}.{near}", file=sys.stderr)
        return 1
    print("\n".join(lines(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
