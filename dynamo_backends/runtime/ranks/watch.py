"""A thread by which the ranks tell each other that they live, through torch's store."""

import os
import socket
import threading
import time
from typing import Any

from dynamo_backends.runtime.ranks.peers import (
    DOUBT,
    SILENCE,
    STORE,
    Signs,
    Verdict,
    different,
    judge,
)

BEAT = 1.0
"""Seconds from one sign of life to the next."""

_LAST = 5.0  # seconds that the end waits for the thread, which a dead store may hold

_FAILURES = 3  # of the store in a row, after which it is left alone: torch reports each


class Watch:
    """Tells the others of this rank and listens to them.

    A process that is suspended tells nothing, for its threads stand still. One that computes for
    long, in Python or elsewhere, goes on telling.

    Args:
        store: Of torch.distributed, on a connection that nobody else uses.
        farewell: Another one, for the end.
        rank: This process.
        size: How many there are.
        keeper: Who holds the store, for people.
        keeper_rank: Its rank; None: it is none of them.

    Attributes:
        found: Ranks that did different things, which is looked for when nobody waits, too.
    """

    def __init__(
        self,
        store: Any,
        farewell: Any,
        rank: int,
        size: int,
        keeper: str,
        keeper_rank: int | None,
    ):
        self._store = store
        self._farewell = farewell
        self._rank = rank
        self._others = [r for r in range(size) if r != rank]
        self._keeper = keeper, keeper_rank
        self._lock = threading.Lock()
        self._mine = Signs(process=f"process {os.getpid()} on {socket.gethostname()}")
        self._signs = {r: Signs() for r in self._others}
        self._texts = dict.fromkeys(self._others, "")
        self._heard = dict.fromkeys(self._others, time.monotonic())
        self._round = time.monotonic()
        self._beats = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dynamo-backends ranks", daemon=True)
        self.found: Verdict | None = None

    def start(self) -> None:
        """Begins to tell; returns at once."""
        self._tell(self._store)
        self._thread.start()

    def note(self, number: int, what: str) -> None:
        """Notes an operation in which all ranks take part, and that begins now."""
        with self._lock:
            self._mine.note(number, what)

    def fail(self, verdict: Verdict) -> None:
        """Tells the others why steps cannot go on."""
        with self._lock:
            self._mine.failure, self._mine.blamed = verdict.text, verdict.rank

    def leave(self) -> None:
        """Tells the others that this process ends; for its exit.

        A daemon thread that comes back from torch while Python ends would end the process.
        """
        self._stopped.set()
        self._thread.join(_LAST)
        with self._lock:
            self._mine.has_left = True
        self._tell(self._farewell)

    def verdict(self, in_doubt: bool) -> Verdict | None:
        """Whom to blame for waiting; None: nobody, for now.

        Args:
            in_doubt: Whether a connection is broken.
        """
        with self._lock:
            now = time.monotonic()
            quiet = now - self._round
            if quiet > (DOUBT if in_doubt else STORE):
                who, rank = self._keeper
                return Verdict(rank, f"{who} does not answer: it has ended or is suspended")
            silent = {r: now - at for r, at in self._heard.items()}
            return judge(self._rank, self._mine, self._signs, silent, in_doubt)

    def behind(self, seconds: float) -> Verdict:
        """Whom to blame for waiting so many seconds where nobody should."""
        with self._lock:
            late = min(self._others, key=lambda rank: self._signs[rank].number)
            return Verdict(
                late,
                f"rank {late} ({self._signs[late].process}) lives, but did not come within "
                f"{seconds:.0f} seconds to where rank {self._rank} {self._mine.now}. All ranks "
                "have to read parameters that are split (state_dict) together",
            )

    def _tell(self, store: Any) -> None:
        with self._lock:
            self._beats += 1
            text = self._mine.dump(self._beats)
        store.set(_key(self._rank), text)

    def _run(self) -> None:
        before = time.monotonic()
        failures = 0
        while failures < _FAILURES and not self._stopped.wait(BEAT):
            try:
                self._tell(self._store)
                texts = self._texts_of_others()
            except Exception:  # the store is gone: what that means `verdict` says in its time
                failures += 1
                continue
            now = time.monotonic()
            self._hear(texts, now, was_away=now - before > SILENCE / 2)
            before, failures = now, 0

    def _texts_of_others(self) -> dict[int, str]:
        """Returns what the others have told, those that have begun."""
        if all(self._texts.values()) and self._store.has_extended_api():
            found = self._store.multi_get([_key(r) for r in self._others])
        else:
            known = [r for r in self._others if self._store.check([_key(r)])]
            return {r: self._store.get(_key(r)).decode() for r in known}
        return {r: text.decode() for r, text in zip(self._others, found, strict=True)}

    def _hear(self, texts: dict[int, str], now: float, was_away: bool) -> None:
        """Takes in what the others told; who was suspended itself blames nobody for it."""
        with self._lock:
            self._round = now
            for rank in self._others:
                text = texts.get(rank, "")
                if was_away or text != self._texts[rank]:
                    self._heard[rank] = now
                if text and text != self._texts[rank]:
                    self._texts[rank], self._signs[rank] = text, Signs.load(text)
            self.found = self.found or different(self._rank, self._mine, self._signs)


def _key(rank: int) -> str:
    return f"signs/{rank}"
