"""Keeps what a long run has found, so that it can go on after an interruption."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from dynamo_backends.conformance.outcomes import Check, Outcome, Status
from dynamo_backends.interface.errors import DynamoBackendsError


class LedgerError(DynamoBackendsError):
    """A file of results cannot be continued; the message says why and what to do."""


class Journal:
    """Outcomes in a file of JSON lines; the first one says what they depend on.

    Args:
        path: The file.
        resume: Use what is in it. Else start anew.
        again: Outcomes of such a status are not used: they are to be tried again.
        context: What outcomes depend on, in types that JSON has.

    Raises:
        LedgerError: The file is of another context.
    """

    def __init__(
        self,
        path: Path,
        resume: bool,
        again: Collection[Status] = (),
        context: Mapping[str, Any] | None = None,
    ):
        self._path = path
        self._again = again
        self.outcomes: dict[Check, Outcome] = {}
        self.context = dict(context or {})
        path.parent.mkdir(parents=True, exist_ok=True)
        if not resume:
            path.unlink(missing_ok=True)
        if path.exists():
            self._read(path.read_text(encoding="utf-8").splitlines())
        else:
            self._write(self.context)

    def _read(self, lines: list[str]) -> None:
        entries = []
        for line in lines:
            try:
                entries.append(json.loads(line))
            except json.JSONDecodeError:  # cut off while it was written
                continue
        found = entries[0] if entries and "status" not in entries[0] else {}
        different = [
            f"{name} is {self.context.get(name)!r} and was {found.get(name)!r}"
            for name in sorted({*found, *self.context})
            if found.get(name) != self.context.get(name)
        ]
        if different:
            raise LedgerError(
                f"{self._path} holds results that were obtained under other conditions: "
                f"{'; '.join(different)}. Pass another directory, or leave out --resume."
            )
        for entry in entries:
            if "status" in entry and entry["status"] not in self._again:
                outcome = Outcome.from_dict(entry)
                self.outcomes[outcome.check] = outcome

    def add(self, outcome: Outcome) -> None:
        """Notes one outcome, at once."""
        self.outcomes[outcome.check] = outcome
        self._write(outcome.to_dict())

    def _write(self, entry: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
