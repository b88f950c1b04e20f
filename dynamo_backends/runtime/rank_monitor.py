"""Detects ranks of a distributed job that ended, hang or diverge.

torchrun's agent ends a job when one of its processes fails, gloo says that a connection was closed
but not whose, and `torch.distributed.monitored_barrier` takes a rank that is slow for a dead one.
So each process tells the others each second, through torch's store, what it does.
"""

import json
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from dynamo_backends.interface.errors import RankError, error_text

BEAT = 1.0
"""Seconds from one sign of life to the next, and between two looks at those of others."""

SILENCE = 30.0
"""Seconds without a sign of life after which a rank, or the store, is taken for dead."""

DOUBT = 6.0
"""The same once a connection to some rank is broken."""

_FAILURES = 3  # of the store in a row, after which it is left alone: torch reports each
_LAST = 5.0  # seconds that the end waits for the thread, which a dead store may hold


@dataclass
class RankHeartbeat:
    """The heartbeat of one rank: its recent operations and failure.

    Attributes:
        process: Its number and host, for people.
        beat: Changes each time.
        doing: Operations in which all ranks take part, by number: the last 8, and the last 8 whose
            number a power of 8 divides. Of two ranks that are far apart, too, some are the same.
        has_left: Whether its script has ended.
        failure: Why its steps cannot go on; empty: they can.
        blamed: The rank to blame for that.
    """

    process: str = ""
    beat: int = 0
    doing: dict[int, str] = field(default_factory=dict)
    has_left: bool = False
    failure: str = ""
    blamed: int | None = None

    def note_operation(self, number: int, what: str) -> None:
        """Records the operation that begins; drops most older ones."""
        told = {**self.doing, number: what}
        near = lambda n: any(n % 8**k == 0 and number - n < 8 ** (k + 1) for k in range(6))  # noqa: E731
        self.doing = {n: told[n] for n in told if near(n)}

    @property
    def operation_number(self) -> int:
        """The number of the last operation."""
        return max(self.doing, default=0)

    @property
    def current_operation(self) -> str:
        """The last operation as text."""
        return self.doing.get(self.operation_number, "waits")

    def to_json(self) -> str:
        """Serializes to JSON."""
        return json.dumps(vars(self))

    @classmethod
    def from_json(cls, text: str) -> "RankHeartbeat":
        """Parses the JSON of `dump`."""
        values = json.loads(text)
        return cls(**values | {"doing": {int(n): what for n, what in values["doing"].items()}})


def make_rank_error(rank: int | None, text: str) -> RankError:
    """Returns a `RankError` with advice, for the rank that caused it."""
    advice = "This mesh cannot run more steps; restart from the last checkpoint."
    return RankError(f"{text}. {advice}", rank)


def find_failed_rank(
    me: int,
    mine: RankHeartbeat,
    others: Mapping[int, RankHeartbeat],
    silent: Mapping[int, float],
    limit: float,
) -> RankError | None:
    """Returns an error for a silent, ended or diverging rank; None if all are fine.

    `silent` are the seconds for which others have told nothing new. `limit` of them are too many;
    it is less than `SILENCE` if a connection is broken.
    """
    for rank, its in sorted(others.items()):
        if its.failure:
            return RankError(f"{its.failure} (reported by rank {rank})", its.blamed)
    for rank, its in sorted(others.items()):
        who = f"rank {rank} ({its.process})"
        if silent[rank] > limit and not its.has_left:
            text = f"{who} has not responded for {silent[rank]:.0f} seconds: its process"
            return make_rank_error(rank, f"{text} was killed, crashed or is suspended")
        if its.has_left and (limit < SILENCE or its.operation_number < mine.operation_number):
            text = f"{who} exited, while rank {me} {mine.current_operation}."
            return make_rank_error(
                rank,
                f"{text} If it raised an exception, fix that; otherwise run the same number of "
                "steps on all ranks",
            )
    return find_divergent_rank(me, mine, others)


def find_divergent_rank(
    me: int, mine: RankHeartbeat, others: Mapping[int, RankHeartbeat]
) -> RankError | None:
    """Returns an error if ranks run different operations at one point; else None."""
    for rank, its in sorted(others.items()):
        for number in sorted(mine.doing.keys() & its.doing.keys()):
            if mine.doing[number] != its.doing[number]:
                said = describe_per_rank({me: mine.doing[number], rank: its.doing[number]})
                return make_rank_error(
                    rank,
                    f"ranks run different operations at the same point: {said}. Run the same steps "
                    "in the same order on all ranks, with batches of the same shapes and equal "
                    "learning rates, and read split parameters (state_dict) on all ranks together",
                )
    return None


def describe_per_rank(said: Mapping[int, str]) -> str:
    """Formats what each rank does: "rank 0 ..., but rank 1 ..."."""
    return ", but ".join(f"rank {rank} {what}" for rank, what in sorted(said.items()))


class RankMonitor:
    """Exchanges heartbeats with other ranks, and raises RankError if one is lost.

    A process that is suspended tells nothing, for its threads stand still. One that computes for
    long, in Python or elsewhere, goes on telling.

    Args:
        stores: Two of torch.distributed's, on connections that nobody else uses.
        rank: This process.
        size: How many there are.
        keeper: To be raised if the store does not answer.

    Attributes:
        on_failure: What is done when steps cannot go on, before the error is raised.
    """

    def __init__(self, stores: tuple[Any, Any], rank: int, size: int, keeper: RankError):
        self.rank = rank
        self.size = size
        self.on_failure: list[Callable[[], None]] = []
        self._store, self._farewell = stores
        self._keeper = keeper
        self._lock = threading.Lock()
        self._mine = RankHeartbeat(f"process {os.getpid()} on {socket.gethostname()}")
        self._others = {r: RankHeartbeat() for r in range(size) if r != rank}
        self._heard = dict.fromkeys(self._others, 0.0)
        self._round = 0.0  # when all others were read last
        self._stopped = threading.Event()
        self._number = 0
        self._different: RankError | None = None  # which is looked for when nobody waits, too
        self._failed: RankError | None = None
        # Calls that may never return are made on a thread of their own.
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._call: Future[Any] | None = None
        self._thread = threading.Thread(
            target=self._listen, name="dynamo-backends ranks", daemon=True
        )
        threading.Thread(target=self._work, name="dynamo-backends mesh", daemon=True).start()
        self._tell(self._store)

    @staticmethod
    def store_key(rank: int) -> str:
        """Returns the store key of a rank's heartbeat."""
        return f"signs/{rank}"

    @property
    def is_blocked_forever(self) -> bool:
        """Whether steps have failed and a call still blocks."""
        return self._failed is not None and self._call is not None and not self._call.done()

    def start_monitoring(self) -> None:
        """Starts the thread that sends and reads heartbeats."""
        self._round = time.monotonic()
        self._heard = dict.fromkeys(self._others, self._round)
        self._thread.start()

    def announce_exit(self) -> None:
        """Tells other ranks that this process exits.

        A daemon thread that comes back from torch while Python ends would end the process.
        """
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(_LAST)
        self._mine.has_left = True
        self._tell(self._farewell)

    def run_on_all_ranks(
        self, what: str, call: Callable[[], Any], patience: float = math.inf
    ) -> Any:
        """Runs an operation that all ranks run in the same order; may raise RankError.

        Args:
            what: The same on all ranks; what goes after "rank 0" in an error.
            call: Does it; may wait for the other ranks.
            patience: Seconds to wait for slow ranks.

        Raises:
            RankError: One of them has ended, is suspended, or does something else.
        """
        if self._failed is None and self._different is not None:
            self._fail(self._different)
        self._number += 1
        with self._lock:
            self._mine.note_operation(self._number, what)
        return self.run_and_wait(call, patience)

    def run_and_wait(self, call: Callable[[], Any], patience: float = math.inf) -> Any:
        """Runs a blocking call in another thread; raises RankError if a rank is lost."""
        if self._failed is not None:
            raise self._failed.with_traceback(None)
        self._call = future = Future[Any]()
        self._calls.put((future, call))
        until = time.monotonic() + patience
        while not wait([future], BEAT).done:
            self._look(SILENCE)
            if time.monotonic() > until:
                self._fail(self._late(patience))
        error = future.exception()
        if error is not None and "gloo" in error_text(error).lower():
            until = time.monotonic() + 2 * DOUBT  # in which the others' signs may explain it
            while time.monotonic() < until:
                self._look(DOUBT)
                time.sleep(BEAT / 4)
            self._fail(make_rank_error(None, f"a collective operation failed: {error_text(error)}"))
        return future.result()

    def _work(self) -> None:
        while True:
            future, call = self._calls.get()
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

    def _look(self, limit: float) -> None:
        with self._lock:
            now = time.monotonic()
            silent = {rank: now - at for rank, at in self._heard.items()}
            found = find_failed_rank(self.rank, self._mine, self._others, silent, limit)
            found = self._keeper if now - self._round > limit else found
        if found is not None:
            self._fail(found)

    def _late(self, seconds: float) -> RankError:
        rank, its = min(self._others.items(), key=lambda item: item[1].operation_number)
        return make_rank_error(
            rank,
            f"rank {rank} ({its.process}) responds, but did not reach the point where rank "
            f"{self.rank} {self._mine.current_operation} within {seconds:.0f} seconds. Read split "
            "parameters (state_dict) on all ranks together",
        )

    def _fail(self, error: RankError) -> None:
        with self._lock:
            self._failed, self._mine.failure, self._mine.blamed = error, str(error), error.rank
        for call in self.on_failure:
            call()
        raise error

    def _tell(self, store: Any) -> None:
        with self._lock:
            self._mine.beat += 1
            text = self._mine.to_json()
        store.set(self.store_key(self.rank), text)

    def _listen(self) -> None:
        failures = 0
        while failures < _FAILURES and not self._stopped.wait(BEAT):
            try:
                self._tell(self._store)
                told = {
                    rank: RankHeartbeat.from_json(self._store.get(self.store_key(rank)))
                    for rank in self._others
                }
            except Exception:  # the store is gone: what that means `_look` says in its time
                failures += 1
                continue
            failures, now = 0, time.monotonic()
            was_away = now - self._round > SILENCE / 2  # and blames nobody for that
            with self._lock:
                for rank, its in told.items():
                    if was_away or its.beat != self._others[rank].beat:
                        self._heard[rank] = now
                self._others, self._round = told, now
                self._different = self._different or find_divergent_rank(
                    self.rank, self._mine, told
                )
