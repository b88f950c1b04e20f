"""Choices among ways to compute one kind of call: raced once on a quiet machine, and then known.

A race on a quiet machine is final: its outcome is kept for the process and on disk. One that others
disturbed decides only where undisturbed samples agree, for a minute, and never on disk; else the
safe way is taken, which is the one that wins such races most often. So the weather of one
compilation is forgotten, and the next one races again.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from dynamo_backends._torch_private.forks import fork_safe_rlock
from dynamo_backends.workers.race import RaceResult

log = logging.getLogger("dynamo_backends")

AGAIN_S = 60.0
"""How long a choice of a disturbed race is taken over: about as long as a compilation takes."""

_PART = "choice"


class Store(Protocol):
    """The interface of a store of choices, such as `runtime.cache.DiskCache`."""

    def get(self, key: str) -> Mapping[str, bytes] | None:
        """Returns the parts stored under a key."""

    def put(self, key: str, parts: Mapping[str, bytes]) -> bool:
        """Stores parts under a key."""


@dataclass(frozen=True)
class Choice:
    """The kernel that is used for a kind of call.

    Attributes:
        way: Its name.
        final: It was raced on a quiet machine.
        since: When it was made, by the clock of `Choices`.
    """

    way: str
    final: bool
    since: float = 0.0


def decide(measured: RaceResult, safe: str, preferred: str) -> Choice:
    """Returns what a race decides.

    Args:
        measured: Its outcome.
        safe: The way to be taken where the race decides nothing.
        preferred: The way to be taken if no other one is faster.
    """
    if not measured.decides:
        return Choice(safe, final=False)
    wins = measured.order[0]
    way = preferred if preferred in measured.equal else wins
    return Choice(way, final=not measured.contention.disturbed)


class Choices:
    """The choices of a process.

    Args:
        store: Gives the place on disk; asked each time.
        holds_for: What choices depend on besides their kinds: processor, versions, sources.
        clock: Tells seconds.
    """

    def __init__(
        self,
        store: Callable[[], Store],
        holds_for: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._store = store
        self._holds_for = holds_for
        self._clock = clock
        self._known: dict[str, Choice] = {}
        self._lock = fork_safe_rlock()

    def __call__(
        self, kind: str, safe: str, preferred: str, race: Callable[[], RaceResult]
    ) -> Choice:
        """Returns the choice for a kind of call.

        Args:
            kind: Equal ones are raced once.
            safe: See `decide`.
            preferred: See `decide`.
            race: Runs the race; while it does, other threads that ask wait.
        """
        with self._lock:
            known = self._known.get(kind) or self._kept(kind)
            if known is None or not self._holds(known):
                known = self._raced(kind, safe, preferred, race)
            self._known[kind] = known
            return known

    def forget(self) -> None:
        """Forgets what this process knows; what is on disk stays."""
        with self._lock:
            self._known.clear()

    def _holds(self, choice: Choice) -> bool:
        return choice.final or self._clock() - choice.since < AGAIN_S

    def _raced(
        self, kind: str, safe: str, preferred: str, race: Callable[[], RaceResult]
    ) -> Choice:
        measured = race()
        found = decide(measured, safe, preferred)
        found = Choice(found.way, found.final, self._clock())
        if found.final:
            data = json.dumps({"kind": kind, "way": found.way}).encode()
            self._store().put(self._key(kind), {_PART: data})
        else:
            text = "%s is used for %s until timings are undisturbed by other processes: %s"
            log.info(text, found.way, kind, measured.contention)
        return found

    def _kept(self, kind: str) -> Choice | None:
        parts = self._store().get(self._key(kind))
        if parts is None or _PART not in parts:
            return None
        return Choice(str(json.loads(parts[_PART])["way"]), final=True)

    def _key(self, kind: str) -> str:
        return hashlib.sha256(f"{self._holds_for()} {kind}".encode()).hexdigest()
