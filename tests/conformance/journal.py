"""Keeps what a long run has found, so that it can go on after an interruption."""

import json
from collections import Counter
from pathlib import Path

from tests.conformance.opinfo import Outcome

Key = tuple[str, str]  # the operator's full name, its dtype


class Journal:
    """Outcomes in a file of JSON lines.

    Args:
        path: The file.
        resume: Use what is in it, failures apart: they are to be tried again. Else start anew.
    """

    def __init__(self, path: Path, resume: bool):
        self._path = path
        self.outcomes: dict[Key, Outcome] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if not resume:
            path.unlink(missing_ok=True)
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                self._read(line)

    def _read(self, line: str) -> None:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:  # cut off while it was written
            return
        if entry["status"] in ("wrong", "crash"):
            return
        outcome = Outcome(**{**entry, "reasons": Counter(entry["reasons"])})
        self.outcomes[self._key(outcome)] = outcome

    @staticmethod
    def _key(outcome: Outcome) -> Key:
        return outcome.op, f"torch.{outcome.dtype}"

    def add(self, outcome: Outcome) -> None:
        """Notes one outcome, at once."""
        self.outcomes[self._key(outcome)] = outcome
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(vars(outcome)) + "\n")
