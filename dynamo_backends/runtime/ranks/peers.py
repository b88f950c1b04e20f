"""What a process knows of the others, and whom it blames if it waits in vain."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SILENCE = 30.0
"""Seconds without a sign of life after which a rank is taken for dead or suspended."""

DOUBT = 6.0
"""The same once a connection to some rank is broken."""

STORE = 20.0
"""Seconds without the store after which whoever holds it is taken for dead."""

_BASE, _LEVELS = 8, 6
"""The last 8 operations are told to the others, and the last 8 whose number a power of 8 divides,
up to the sixth: of two ranks that are far apart, too, some are the same."""


@dataclass
class Signs:
    """What one rank tells the others, again and again.

    Attributes:
        process: Its number and host, for people.
        doing: Its last operations in which all ranks take part: number and name.
        has_left: Whether its script has ended.
        failure: Why its steps cannot go on; empty: they can.
        blamed: The rank to blame for that.
    """

    process: str = ""
    doing: dict[int, str] = field(default_factory=dict)
    has_left: bool = False
    failure: str = ""
    blamed: int | None = None

    def note(self, number: int, what: str) -> None:
        """Notes the operation that begins; most of the old ones are forgotten."""
        self.doing[number] = what
        for old in [k for k in self.doing if not _is_told(k, number)]:
            del self.doing[old]

    @property
    def number(self) -> int:
        """Of the last operation."""
        return max(self.doing, default=0)

    @property
    def now(self) -> str:
        """The last operation, in words."""
        return self.doing.get(self.number, "waits")

    def dump(self, beat: int) -> str:
        """As text that differs from the one before."""
        return json.dumps({"beat": beat, **vars(self)})

    @classmethod
    def load(cls, text: str) -> "Signs":
        """Returns the reverse of `dump`."""
        values = json.loads(text)
        values.pop("beat")
        values["doing"] = {int(k): v for k, v in values["doing"].items()}
        return cls(**values)


def _is_told(number: int, last: int) -> bool:
    """Returns whether an operation is still told when another is the last one."""
    strides = (_BASE**level for level in range(_LEVELS))
    return any(number % n == 0 and last - number < _BASE * n for n in strides)


@dataclass(frozen=True)
class Verdict:
    """Why steps cannot go on.

    Attributes:
        rank: To blame.
        text: For people; names the rank.
    """

    rank: int | None
    text: str


def judge(
    me: int,
    mine: Signs,
    others: Mapping[int, Signs],
    silent: Mapping[int, float],
    in_doubt: bool = False,
) -> Verdict | None:
    """Whom to blame for waiting; None: nobody, for now.

    Args:
        me: This rank.
        mine: What it tells.
        others: What the others told last, by rank.
        silent: For how many seconds each has told nothing new.
        in_doubt: Whether a connection to some rank is broken.
    """
    limit = DOUBT if in_doubt else SILENCE
    for rank, signs in sorted(others.items()):
        if signs.failure:
            return Verdict(signs.blamed, f"{signs.failure} (rank {rank} found out)")
    for rank, signs in sorted(others.items()):
        if silent[rank] > limit and not signs.has_left:
            return Verdict(
                rank,
                f"rank {rank} ({signs.process}) has given no sign of life for "
                f"{silent[rank]:.0f} seconds: its process was killed, has crashed or is suspended",
            )
    for rank, signs in sorted(others.items()):
        if signs.has_left and (in_doubt or signs.number < mine.number):
            return Verdict(
                rank,
                f"rank {rank} ({signs.process}) has ended, while rank {me} {mine.now}. If it "
                "raised an exception, that is what to look at; else all ranks have to take "
                "equally many steps",
            )
    return different(me, mine, others)


def different(me: int, mine: Signs, others: Mapping[int, Signs]) -> Verdict | None:
    """Ranks that do different things at the same point."""
    for rank, signs in sorted(others.items()):
        for number in sorted(mine.doing.keys() & signs.doing.keys()):
            if mine.doing[number] != signs.doing[number]:
                text = told_apart({me: mine.doing[number], rank: signs.doing[number]})
                return Verdict(
                    rank,
                    f"ranks do different things at the same point: {text}. All ranks have to take "
                    "the same steps in the same order, with batches of the same shapes and equal "
                    "learning rates, and to read parameters that are split (state_dict) together",
                )
    return None


def told_apart(said: Mapping[int, str]) -> str:
    """Returns what each rank does, in words: "rank 0 …, but rank 1 …"."""
    return ", but ".join(f"rank {rank} {what}" for rank, what in sorted(said.items()))


def listed(ranks: Sequence[int]) -> str:
    """Such as "rank 1" or "ranks 1, 3"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
