"""Tables for people and JSON for programs."""

import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dynamo_backends.bench import results_files
from dynamo_backends.bench.environment import environment, environment_line
from dynamo_backends.workers.statistics import Ratio
from harness.kept import typed
from harness.runner import Result


def make_console() -> Console:
    """Returns a console that is wide enough for tables where no terminal says how wide."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def announce() -> Console:
    """Prints what measurements depend on; returns the console."""
    console = make_console()
    console.print(f"[dim]{environment_line()}[/]")
    return console


def refused(error: object, console: Console) -> int:
    """Prints why the command line cannot be followed; returns the exit status."""
    console.print(f"[red]{error}[/]", highlight=False)
    return 2


def table(
    heads: Iterable[str], rows: Iterable[Iterable[str]], title: str | None = None, left: int = 1
) -> Table:
    """Builds a table whose first `left` columns are words and whose others are numbers."""
    made = Table(title=title, box=SIMPLE_HEAD, pad_edge=False)
    for at, head in enumerate(heads):
        made.add_column(head, justify="left" if at < left else "right")
    for row in rows:
        made.add_row(*row)
    return made


def report(
    published: Callable[[Mapping[str, Any]], Sequence[Any]],
    settings: Namespace,
    kind: str,
    records: Sequence[Any],
    console: Console,
) -> None:
    """Prints what pages show of some records, and saves these if `--json` names a file."""
    content = {"kind": kind, "settings": vars(settings), "results": records}
    for part in published(content):
        console.print(part, highlight=False)
    if settings.json:
        save_json(settings.json, kind, records, settings=vars(settings))


def save_json(path: str | Path, kind: str, records: Sequence[Any], **more: Any) -> None:
    """Writes measurements with their environment; the file appears whole or not at all.

    The date and the command are among them.

    Args:
        path: File to write; its folder is made if absent.
        kind: What was measured.
        records: One per row.
        **more: Further top-level entries, such as the settings.
    """
    facts = {"date": time.strftime("%Y-%m-%d"), **environment()}
    content = {"command": typed(sys.argv), "environment": facts}
    if "settings" in more:  # but for the place of this file
        more["settings"] = {k: v for k, v in more["settings"].items() if k != "json"}
    content |= {**more, "results": list(records)}
    results_files.write(Path(path), kind, content)


def format_ratio(ratio: Ratio) -> str:
    """Formats a speedup and its interval, such as "1.62 [1.58, 1.66]" (escaped for rich)."""
    return rf"{ratio.value:.2f} \[{ratio.low:.2f}, {ratio.high:.2f}]"


def results_table(title: str, results: Sequence[Result]) -> Table:
    """Builds a table of times, speedup, accuracy, graphs, operators and seconds of compilation."""
    several = len({result.backend for result in results}) > 1
    names = ["model", "backend"] if several else ["model"]
    heads = [*names, "eager\nms", "\nms", "ratio\n\\[95% CI]", "largest\ndifference", "\ngraphs"]
    heads += ["ops on\nbackend", "ops in\neager", "compile\ns", "\nright"]
    rows = [[getattr(r, name) for name in names] + _cells(r) for r in results]
    made = table(heads, rows, title, left=len(names))
    for column in made.columns[len(names) :]:
        column.no_wrap = True
    return made


def _cells(result: Result) -> list[str]:
    compiled, timing, accuracy = result.compiled, result.timing, result.accuracy
    return [
        f"{result.eager.median * 1e3:.2f}" if result.eager else "-",
        f"{timing.median * 1e3:.2f}" if timing else "-",
        format_ratio(timing.speedup) if timing else "-",
        f"{accuracy.max_abs:.1e}" if accuracy else "-",
        str(compiled.graphs) if compiled else "-",
        _count(compiled.ops_on_backend) if compiled else "-",
        _count(compiled.ops_in_eager) if compiled else "-",
        f"{compiled.first_call_s:.1f}" if compiled else "-",
        "[green]yes[/]" if result.passed else "[bold red]NO[/]",
    ]


def _count(number: int | None) -> str:
    return "?" if number is None else str(number)
