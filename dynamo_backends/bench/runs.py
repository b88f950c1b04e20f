"""Measures the cells of a run one after the other, and saves each."""

import math
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from dynamo_backends.bench import saved_run
from dynamo_backends.bench.cells import BenchConfig, Cell, Outcome, Run, as_ratio
from dynamo_backends.bench.environment import environment
from dynamo_backends.bench.processes import measure

_STYLE = {"pass": "green", "eager_two_runs_differ": "yellow", "eager_fail_to_run": "yellow"}


def context(how: BenchConfig) -> dict[str, Any]:
    """Returns what the figures of a run depend on."""
    facts = environment()
    if how.threads is not None:
        facts["torch_threads"] = how.threads
    return {**facts, **asdict(how), "date": time.strftime("%Y-%m-%d")}


def measure_all(
    run: Run, cells: Sequence[Cell], how: BenchConfig, path: Path, console: Console
) -> None:
    """Measures what is left of some cells of a run; each is saved as soon as it is measured.

    Args:
        run: Gets the cells that it does not have, and the outcomes.
        cells: Those that are asked for.
        how: How they are measured.
        path: Where it is saved.
        console: Gets a line for each, and how long the rest will take.
    """
    run.cells = list(dict.fromkeys([*run.cells, *cells]))
    saved_run.save(run, path)
    due = run.left_of(cells)
    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")
    with (
        exit_cleanly_on_sigterm(),
        Progress(*columns, console=console, transient=True) as progress,
    ):
        task = progress.add_task("", total=len(cells), completed=len(cells) - len(due))
        for number, cell in enumerate(due):
            text = format_duration(run.seconds_for(due[number:]))
            progress.update(task, description=f"{cell}, {text} left")
            run.outcomes[cell] = measure(cell, how)
            saved_run.save(run, path)
            progress.advance(task)
            console.print(_line(run, cells, cell), highlight=False, soft_wrap=True)


@contextmanager
def exit_cleanly_on_sigterm() -> Iterator[None]:
    """Makes SIGTERM end the process as Ctrl-C does, inside a `with` block."""
    handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def _line(run: Run, cells: Sequence[Cell], cell: Cell) -> str:
    outcome, due = run.outcomes[cell], run.left_of(cells)
    left = f", {format_duration(run.seconds_for(due))} left" if due else ""
    return (
        rf"\[{len(cells) - len(due)}/{len(cells)}] {cell}: {_what(outcome)} "
        f"[dim]({format_duration(outcome.seconds)}{left})[/]"
    )


def _what(outcome: Outcome) -> str:
    style = _STYLE.get(outcome.status, "bold red")
    text = f"[{style}]{outcome.status}[/]"
    if outcome.speedup is not None and outcome.passed:
        found = outcome.speedup
        text += (
            rf" {as_ratio(found.value)} x eager \[{as_ratio(found.low)}, {as_ratio(found.high)}]"
        )
    return text + (f": {outcome.reason}".replace("[", r"\[") if outcome.reason else "")


def format_duration(seconds: float) -> str:
    """Formats seconds, such as "41 s" or "1 h 20 min"."""
    if math.isnan(seconds):
        return "unknown time"
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
