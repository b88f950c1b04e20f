"""Results that are kept after each measurement, so that the same command goes on."""

import json
import os
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dynamo_backends.bench import results_files
from dynamo_backends.bench.environment import environment
from harness.processes import ChildError

RUNNER = "BENCHMARK_RUNNER"
"""The variable that says what runs a program, if that is not Python alone."""

_WHERE_AND_WHEN = ("--json", "--minutes", "--budget")

Results = dict[str, Any]
"""What was measured, by name; of what failed {"error": text}."""


class Kept:
    """A file of results.

    Args:
        settings: Of the command line: `json` is the path of the file, which is read if it exists;
            None: nothing is kept.
        kind: What is measured.
        names: Of the settings that results depend on, beside the environment. An existing file has
            to have the same.

    Attributes:
        results: What was measured so far.
        left: How many measurements remain.

    Raises:
        ResultError: The file is none of these, or belongs to another machine or other settings.
    """

    def __init__(self, settings: Namespace, kind: str, names: Sequence[str]):
        self._settings, self._kind = settings, kind
        facts = {**environment(), **{name: getattr(settings, name) for name in names}}
        self._context = {"date": time.strftime("%Y-%m-%d"), **json.loads(json.dumps(facts))}
        self._command = typed(sys.argv)
        self.results: Results = {}
        self.left = 0
        if settings.json and Path(settings.json).exists():
            self._read(Path(settings.json))

    def _read(self, path: Path) -> None:
        content = results_files.read(path, self._kind)
        try:
            self.results, found = dict(content["results"]), content["context"]
        except (KeyError, TypeError, ValueError) as error:
            raise results_files.damaged(path, self._kind, error) from error
        self._command = content.get("command", self._command)
        results_files.check_context(path, found, self._context)

    def extra(self) -> dict[str, Any]:
        """Returns what else the file has, for other programs."""
        return {}

    def measure_left(
        self, names: Sequence[str], measure: Callable[[str], Any], console: Console
    ) -> None:
        """Measures what is not kept yet, or has failed, and keeps it.

        Args:
            names: Of all there is to measure.
            measure: Measures one; `ChildError` is kept as its error.
            console: For the progress bar.
        """
        todo = [n for n in names if n not in self.results or self.results[n].get("error")]
        self.left, start = len(todo), time.perf_counter()
        minutes = getattr(self._settings, "minutes", None)
        for name in _shown(todo, len(names), console):
            if minutes is not None and time.perf_counter() - start > minutes * 60:
                return
            try:
                self.results[name] = measure(name)
            except ChildError as error:
                self.results[name] = {"error": str(error)}
            self.left -= 1
            if self._settings.json:
                facts = {"command": self._command, "context": self._context}
                content = {**facts, "results": self.results, **self.extra()}
                results_files.write(Path(self._settings.json), self._kind, content)

    def status(self, problems: Sequence[str], console: Console) -> int:
        """Prints problems and how much is left; returns the exit status, 1 with problems."""
        for text in problems:
            console.print(f"[red]{text}[/]", highlight=False)
        if self.left:
            more = "; the same command goes on" if self._settings.json else ""
            console.print(f"{self.left} are left{more}")
        return int(bool(problems))


def typed(argv: Sequence[str]) -> str:
    """Returns the command of a program, without where and until when it keeps its results.

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


def _shown(todo: Sequence[str], total: int, console: Console) -> Iterator[str]:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=total, completed=total - len(todo))
        for name in todo:
            progress.update(task, description=name)
            yield name
            progress.advance(task)
