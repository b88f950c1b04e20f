"""Tables for people and JSON for programs."""

import sys
import time
from collections.abc import Sequence
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
    """A console for reports; wide enough for their tables where no terminal says how wide."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def announce() -> Console:
    """A console that has printed what measurements depend on."""
    console = make_console()
    console.print(f"[dim]{environment_line()}[/]")
    return console


def results_table(title: str, results: Sequence[Result]) -> Table:
    """One line per model and backend: times, speedup, accuracy, graphs, operators, compile time."""
    several = len({result.backend for result in results}) > 1
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False)
    for name in ("model", "backend") if several else ("model",):
        table.add_column(name)
    for name in ("eager\nms", "\nms", "ratio\n\\[95% CI]", "largest\ndifference", "\ngraphs"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("ops on\nbackend", "ops in\neager", "compile\ns", "\nright"):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        head = [result.model, result.backend] if several else [result.model]
        table.add_row(*head, *_cells(result))
    return table


def _cells(result: Result) -> list[str]:
    compiled, timing, accuracy = result.compiled, result.timing, result.accuracy
    return [
        _milliseconds(result.eager.median) if result.eager else "-",
        _milliseconds(timing.median) if timing else "-",
        format_ratio(timing.speedup) if timing else "-",
        f"{accuracy.max_abs:.1e}" if accuracy else "-",
        str(compiled.graphs) if compiled else "-",
        _count(compiled.ops_on_backend) if compiled else "-",
        _count(compiled.ops_in_eager) if compiled else "-",
        f"{compiled.first_call_s:.1f}" if compiled else "-",
        "[green]yes[/]" if result.passed else "[bold red]NO[/]",
    ]


def format_ratio(ratio: Ratio) -> str:
    """A speedup and its interval, such as "1.62 [1.58, 1.66]" (escaped for rich)."""
    return rf"{ratio.value:.2f} \[{ratio.low:.2f}, {ratio.high:.2f}]"


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
        more["settings"] = {k: v for k, v in more["settings"].items() if k not in ("json", "child")}
    content |= {**more, "results": list(records)}
    results_files.write(Path(path), kind, content)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _count(number: int | None) -> str:
    return "?" if number is None else str(number)
