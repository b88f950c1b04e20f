"""Tables for people and JSON for programs."""

import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dynamo_backends.bench.environment import environment, environment_line
from dynamo_backends.bench.statistics import geometric_mean
from dynamo_backends.runtime.cache import write_whole
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


@dataclass(frozen=True)
class Summary:
    """A backend's speedups over several models.

    Attributes:
        mean: Their geometric mean.
        lowest: The smallest.
        models: How many there are: those that ran and were right.
    """

    mean: float
    lowest: float
    models: int


def summarize(results: Iterable[Result]) -> dict[str, Summary]:
    """The speedups of each backend in short."""
    speedups: dict[str, list[float]] = {}
    for result in results:
        if result.timing is not None:
            speedups.setdefault(result.backend, []).append(result.timing.speedup.value)
    return {name: Summary(geometric_mean(s), min(s), len(s)) for name, s in speedups.items()}


def as_record(result: Result) -> dict[str, Any]:
    """A result as plain data, for JSON; times in milliseconds."""
    timing, compiled, accuracy = result.timing, result.compiled, result.accuracy
    return {
        "model": result.model,
        "backend": result.backend,
        "passed": result.passed,
        "error": result.error,
        "eager_ms": result.eager.median * 1e3 if result.eager else None,
        "ms": timing.median * 1e3 if timing else None,
        "ratio": timing.speedup.value if timing else None,
        "ratio_95": [timing.speedup.low, timing.speedup.high] if timing else None,
        "max_abs": accuracy.max_abs if accuracy else None,
        "max_rel": accuracy.max_rel if accuracy else None,
        "graphs": compiled.graphs if compiled else None,
        "ops_on_backend": compiled.ops_on_backend if compiled else None,
        "ops_in_eager": compiled.ops_in_eager if compiled else None,
        "fallbacks": [[f.op, f.reason, f.count] for f in compiled.fallbacks] if compiled else [],
        "first_call_s": compiled.first_call_s if compiled else None,
        "backend_compile_s": compiled.backend_s if compiled else None,
    }


def save_json(path: str | Path, kind: str, records: Sequence[Any], **more: Any) -> None:
    """Writes measurements with their environment; the file appears whole or not at all.

    The date and the command are among them.

    Args:
        path: File to write; its folder is made if absent.
        kind: What was measured.
        records: One per row.
        **more: Further top-level entries, such as the settings.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {"date": time.strftime("%Y-%m-%d"), **environment()}
    content = {"kind": kind, "command": typed(sys.argv), "environment": facts}
    if "settings" in more:  # but for the place of this file
        more["settings"] = {k: v for k, v in more["settings"].items() if k not in ("json", "child")}
    content |= {**more, "results": list(records)}
    write_whole(path, (json.dumps(content, indent=2) + "\n").encode())


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _count(number: int | None) -> str:
    return "?" if number is None else str(number)
