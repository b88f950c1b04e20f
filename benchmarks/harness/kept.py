"""Results of processes that measure one thing each: kept after every one, for the next run."""

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dynamo_backends.autotune.decisions import FORMAT
from dynamo_backends.bench import results_files
from harness.processes import ChildError

RUNNER = "BENCHMARK_RUNNER"
"""The variable that says what runs a program, if that is not Python alone."""

_WHERE_AND_WHEN = ("--json", "--minutes", "--budget")

Results = dict[str, Any]
"""What was measured, by name; of what failed {"error": text}."""


class Kept:
    """A file of results.

    Args:
        path: Of the file, which is read if it exists, else made. None: nothing is kept.
        kind: What is measured.
        context: What results depend on, to which the date is added; an existing file has to have
            the same, but for the date.

    Attributes:
        results: What was measured so far.
        command: What was typed when the first of it was measured, but for where it is kept.

    Raises:
        ResultError: The file is none of these, or belongs to another machine or other settings.
    """

    def __init__(self, path: str | Path | None, kind: str, context: Mapping[str, Any]):
        self.path = None if path is None else Path(path)
        self.context = {"date": time.strftime("%Y-%m-%d"), **json.loads(json.dumps(context))}
        self.results: Results = {}
        self.command = typed(sys.argv)
        self._kind = kind
        if self.path is not None and self.path.exists():
            self._read(self.path)

    def _read(self, path: Path) -> None:
        content = results_files.read(path, self._kind)
        try:
            self.results, found = content["results"], content["context"]
        except KeyError as error:
            raise results_files.damaged(path, self._kind, error) from error
        self.command = content.get("command", self.command)
        results_files.check_context(path, found, self.context)

    def add(self, name: str, result: Any) -> None:
        """Keeps a result; the file appears whole or not at all."""
        self.results[name] = result
        if self.path is not None:
            facts = {"command": self.command, "context": self.context}
            content = {**facts, "results": self.results, **self.extra()}
            results_files.write(self.path, self._kind, content)

    def extra(self) -> dict[str, Any]:
        """What else the file has, for other programs."""
        return {}


class Recorded(Kept):
    """Autotune's decisions by suite/model/…, also in the form of `dynamo-backends cache export`."""

    def extra(self) -> dict[str, Any]:
        """See `Kept.extra`."""
        found = {n: r["decisions"] for n, r in self.results.items() if r.get("decisions")}
        return {
            "format": FORMAT,
            "decisions": [d for some in found.values() for d in some],
            "models": {d["key"]: n.split("/")[1] for n, some in found.items() for d in some},
        }


def typed(argv: Sequence[str]) -> str:
    """The command of a program, without what says where and until when it keeps its results.

    Args:
        argv: As `sys.argv`: the program's file and its arguments.
    """
    program = Path(argv[0])
    words, rest = [], iter(argv[1:])
    for word in rest:
        if word in _WHERE_AND_WHEN:
            next(rest, None)
        elif word.partition("=")[0] not in _WHERE_AND_WHEN:
            words.append(word)
    own = [f"{program.parent.name}/{program.name}", *words]
    return f"{os.environ.get(RUNNER, 'python')} {shlex.join(own)}"


def measure_left(
    names: Sequence[str],
    kept: Kept,
    measure: Callable[[str], Any],
    console: Console,
    minutes: float | None = None,
) -> int:
    """Measures what is not kept yet.

    Args:
        names: Of all there is to measure.
        kept: Where results go.
        measure: Measures one, in a process; `ChildError` is kept as its error.
        console: For the progress bar.
        minutes: None is begun later than so many minutes after the start; None: all are.

    Returns:
        How many remain.
    """
    left = [name for name in names if name not in kept.results]
    start = time.perf_counter()
    for done, name in enumerate(_shown(left, len(names), console)):
        if minutes is not None and time.perf_counter() - start > minutes * 60:
            return len(left) - done
        try:
            kept.add(name, measure(name))
        except ChildError as error:
            kept.add(name, {"error": str(error)})
    return 0


def _shown(left: Sequence[str], total: int, console: Console) -> Iterator[str]:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=total, completed=total - len(left))
        for name in left:
            progress.update(task, description=name)
            yield name
            progress.advance(task)
