"""Results of a long comparison, saved after every step and continued by the next run."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dynamo_backends.bench import results_files
from harness.cells import Cell, Row
from harness.kept import typed


class Ledger:
    """A file of measured cells.

    If the process dies while it compiles a backend, the next run tries once more; after the second
    time that backend counts as failed in that cell.

    Args:
        path: The file; it is read if it exists, else made.
        context: What results depend on (device, versions, settings): those of an existing file
            have to be the same, except the "date", which remains that of its beginning.

    Attributes:
        results: The rows of each measured cell.
        command: What was typed when the first of it was measured.
        died: Backends during which the process died, by cell; a name for each time.

    Raises:
        ResultError: The file belongs to another machine or version, or is no such file.
    """

    KIND = "cells"
    DEATHS = 2

    def __init__(self, path: str | Path, context: Mapping[str, Any]):
        self.path = Path(path)
        self.context = json.loads(json.dumps(context))
        self.results: dict[Cell, list[Row]] = {}
        self.seconds: dict[Cell, float] = {}
        self.died: dict[Cell, list[str]] = {}
        self.command = typed(sys.argv)
        self._running: tuple[Cell, str] | None = None
        if self.path.exists():
            self._read()

    def deadly(self, cell: Cell) -> list[str]:
        """Backends that are not tried again in a cell."""
        names = self.died.get(cell, [])
        return [n for n in dict.fromkeys(names) if names.count(n) >= self.DEATHS]

    def interrupt(self) -> None:
        """Notes that the process ends of its own will: nothing under way is to blame."""
        self._running = None
        self.save()

    def begin(self, cell: Cell, backend: str) -> None:
        """Notes what is under way, so that it is known if the process does not survive it."""
        self._running = (cell, backend)
        self.save()

    def finish(self, cell: Cell, rows: Sequence[Row], seconds: float) -> None:
        """Adds a cell's rows."""
        dead = [
            Row(name, "failed", error="the process died while it was compiled or called")
            for name in self.deadly(cell)
        ]
        self.results[cell] = [*rows, *dead]
        self.seconds[cell] = seconds
        self._running = None
        self.save()

    def save(self) -> None:
        """Writes the file; it appears whole or not at all."""
        running = None
        if self._running is not None:
            running = {"cell": self._running[0].as_dict(), "backend": self._running[1]}
        content = {
            "command": self.command,
            "context": self.context,
            "running": running,
            "died": [{"cell": c.as_dict(), "backends": n} for c, n in self.died.items()],
            "results": [
                {"cell": c.as_dict(), "seconds": self.seconds[c], "rows": [asdict(r) for r in rows]}
                for c, rows in self.results.items()
            ],
        }
        results_files.write(self.path, self.KIND, content)

    def _read(self) -> None:
        content = results_files.read(self.path, self.KIND)
        try:
            found = content["context"]
            self.died = {_cell(x["cell"]): list(x["backends"]) for x in content["died"]}
            self.results = rows_of(content)
            self.seconds = {_cell(x["cell"]): x["seconds"] for x in content["results"]}
            running = content["running"]
        except (ValueError, KeyError, TypeError) as error:
            raise results_files.damaged(self.path, self.KIND, error) from error
        results_files.check_context(self.path, found, self.context)
        self.context["date"] = found.get("date")
        self.command = content.get("command", self.command)
        if running is not None:
            self.died.setdefault(_cell(running["cell"]), []).append(running["backend"])


def rows_of(content: Mapping[str, Any]) -> dict[Cell, list[Row]]:
    """The rows of each cell in the content of such a file."""
    return {_cell(x["cell"]): [_row(r) for r in x["rows"]] for x in content["results"]}


def _cell(given: Mapping[str, Any]) -> Cell:
    return Cell(**given)


def _row(given: Mapping[str, Any]) -> Row:
    values = dict(given)
    if values.get("ratio_95") is not None:
        values["ratio_95"] = tuple(values["ratio_95"])
    return Row(**values)
