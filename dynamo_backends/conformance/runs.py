"""Runs checks group by group in processes of their own, and notes each."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from dynamo_backends.bench.cells import short
from dynamo_backends.bench.environment import environment
from dynamo_backends.bench.runs import exit_cleanly_on_sigterm, format_duration
from dynamo_backends.conformance import workers
from dynamo_backends.conformance.catalogue import CheckRunner, Settings
from dynamo_backends.conformance.journal import Journal
from dynamo_backends.conformance.outcomes import GROUPS, Check, Outcome
from dynamo_backends.conformance.rewrites.running import smallest_crash
from dynamo_backends.interface.registry import get_backend, list_backends, third_party_version

_STYLES = {"native": "green", "fallback": "green", "random": "green", "declared": "yellow",
           "torch": "yellow", "no samples": "yellow"}  # fmt: skip


@dataclass(frozen=True)
class Files:
    """The files of a run's results.

    Attributes:
        journal: Each outcome as soon as it is there.
        json: All of them, at the end.
        page: For people.
        log: What the processes printed.
    """

    journal: Path
    json: Path
    page: Path
    log: Path

    @classmethod
    def of(cls, backend: str, folder: Path) -> "Files":
        """Returns the files of a backend's run in a folder."""
        name = re.sub(r"[^\w.-]+", "_", short(backend))
        return cls(*(folder / f"{name}.{end}" for end in ("jsonl", "json", "md", "log")))


def context(settings: Settings) -> dict[str, Any]:
    """Returns what outcomes depend on."""
    return {
        **environment(),
        "torch_threads": settings.threads,
        "backend": settings.backend,
        "packages": _packages(settings.backend),
        "samples": settings.samples,
    }


def _packages(backend: str) -> dict[str, str]:
    """Returns what is behind a backend, with versions."""
    found = {"torch": str(torch.__version__)}
    if backend in list_backends():
        return found | get_backend(backend).versions()
    other = third_party_version(backend)
    return found if other is None else found | {other[0]: other[1]}


def run_all(
    asked: list[Check],
    settings: Settings,
    journal: Journal,
    console: Console,
    processes: int = 1,
    log: Path | None = None,
) -> None:
    """Runs what is left of the checks; each is noted as soon as it is done.

    Args:
        asked: The checks, in the order of their groups.
        settings: The backend, and limits.
        journal: Has what is done, and gets the rest.
        console: Gets a line for each failure, and how long the rest will take.
        processes: Number of processes at a time.
        log: Gets what the processes print.
    """
    left = [check for check in asked if check not in journal.outcomes]
    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")
    with exit_cleanly_on_sigterm(), Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(asked), completed=len(asked) - len(left))
        began = time.monotonic()
        for done, outcome in enumerate(_outcomes(left, settings, processes, log), start=1):
            journal.add(outcome)
            remaining = (time.monotonic() - began) / done * (len(left) - done)
            text = f"{escape(str(outcome.check))}, {format_duration(remaining)} left"
            progress.update(task, advance=1, description=text)
            if outcome.failed or not (console.is_terminal or outcome.group == "rewrites"):
                place = f"{len(asked) - len(left) + done}/{len(asked)}"
                console.print(_line(outcome, place, remaining), highlight=False, soft_wrap=True)
            if outcome.example:
                console.print(outcome.example, highlight=False, markup=False, soft_wrap=True)


def _outcomes(
    left: list[Check], settings: Settings, processes: int, log: Path | None
) -> Iterator[Outcome]:
    work = CheckRunner(settings)
    for _, checks in groupby(left, key=lambda check: check.group):
        for outcome in workers.map_in_processes(
            work, checks, work.broke_down, processes, limit_s=settings.limit_s, log=log
        ):
            if outcome.group == "rewrites":
                ended = outcome.status in ("crash", "timeout")
                limit_s = settings.limit_s / 4
                yield smallest_crash(outcome, settings.backend, limit_s) if ended else outcome
                continue
            again = outcome.failed and outcome.status != "timeout"
            yield _alone(outcome, work, settings, log) if again else outcome


def _alone(outcome: Outcome, work: CheckRunner, settings: Settings, log: Path | None) -> Outcome:
    """A failure, tried again in a process that has done nothing else: it may come from before."""
    (again,) = workers.map_in_processes(
        work, [outcome.check], work.broke_down, 1, limit_s=settings.limit_s, log=log
    )
    if again.failed:
        return again
    text = f"{outcome.reason} after other checks; in a process of its own: {again.status}"
    return outcome.fail(outcome.status, text)


def _line(outcome: Outcome, place: str, remaining: float) -> str:
    style = _STYLES.get(outcome.status, "bold red")
    reason = f": {outcome.reason}" if outcome.reason else ""
    return (
        rf"\[{place}] {escape(str(outcome.check))} [{style}]{outcome.status}[/]{escape(reason)} "
        f"[dim]({format_duration(outcome.seconds)}, {format_duration(remaining)} left)[/]"
    )


def result(
    asked: list[Check], journal: Journal, given: Mapping[str, Any], commands: Sequence[str]
) -> dict[str, Any]:
    """Returns a run as a JSON-compatible dictionary, earlier resumed parts included.

    Args:
        asked: The checks.
        journal: Has the outcomes of those that were run.
        given: Their context.
        commands: What was typed, once for each part.
    """
    done = sorted(journal.outcomes, key=lambda check: GROUPS.index(check.group))
    outcomes = [journal.outcomes[check] for check in done]
    return {
        "kind": "dynamo-backends conformance",
        "commands": list(commands),
        "date": time.strftime("%Y-%m-%d"),
        "context": dict(given),
        "not_run": [str(c) for c in asked if c not in journal.outcomes],
        "results": [outcome.to_dict() for outcome in outcomes],
    }
