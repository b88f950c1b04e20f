"""Stores the fastest schedule of each fused function that tuning has found.

Records hold for one kind of processor, number of threads and version of TVM. A function that has
one gets that schedule, also when nothing is tuned any more. Several processes may share them; a
damaged one is dropped with a warning.
"""

import hashlib
import json
import logging
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dynamo_backends.runtime.cache import DiskCache, cache_folder

log = logging.getLogger("dynamo_backends")

FOLDER = "tvm-tuning"
_FORMAT = 1
_PART = "record"


@dataclass(frozen=True)
class Record:
    """The fastest schedule of a function.

    Attributes:
        trace: How to schedule it, as JSON has it; None: the default schedule is the fastest.
        mark: A hash of the scheduled function (see `search.mark`); empty with the default one.
        trials: Schedules that were measured.
        goal: The option `tune_trials` under which the search was finished; 0: it was cut short.
        speedup: Time of the default schedule over that of this one, with its 95% confidence
            interval; None with the default one.
        again_at: When to tune anew, in seconds since 1970: the machine was busy while schedules
            were compared. 0: it was not.
    """

    trace: list[Any] | dict[str, Any] | None
    mark: str
    trials: int = 0
    goal: int = 0
    speedup: tuple[float, float, float] | None = None
    again_at: float = 0.0

    def meets(self, goal: int) -> bool:
        """Returns whether nothing is left to be tuned for an option `tune_trials`."""
        return self.goal >= goal and not 0 < self.again_at < time.time()

    def to_bytes(self) -> bytes:
        """Returns the record as JSON."""
        return json.dumps({"format": _FORMAT, **asdict(self)}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Record":
        """Returns the reverse of `to_bytes`.

        Raises:
            ValueError: It is no record; the message says why.
        """
        fields = json.loads(data)
        if not isinstance(fields, dict) or fields.pop("format", None) != _FORMAT:
            raise ValueError(f"it does not have the format {_FORMAT}")
        fields.setdefault("again_at", 0.0)
        for name, kinds in _TYPES.items():
            if not isinstance(fields.get(name), kinds):
                raise ValueError(f"{name!r} is missing or wrong")
        speedup = fields["speedup"]
        fields["speedup"] = None if speedup is None else tuple(map(float, speedup))
        return cls(**{name: fields[name] for name in _TYPES})


_TYPES: dict[str, Any] = {
    "trace": list | dict | None,
    "mark": str,
    "trials": int,
    "goal": int,
    "speedup": list | None,
    "again_at": float,
}


class Records:
    """The records of one kind of processor.

    Args:
        environment: What programs and their times depend on.
    """

    def __init__(self, environment: str):
        name = hashlib.sha256(environment.encode()).hexdigest()[:16]
        self.folder = cache_folder() / FOLDER / name
        self._disk = DiskCache(self.folder, what="records of tuning")

    @property
    def empty(self) -> bool:
        """Returns whether there is none."""
        return not self.folder.is_dir() and not _unwritten

    def get(self, key: str) -> Record | None:
        """Returns the record of a function; None if there is no usable one."""
        here = _unwritten.get((self.folder, key))
        if here is not None:
            return here
        parts = self._disk.get(key)
        if parts is None:
            return None
        try:
            return Record.from_bytes(parts[_PART])
        except (ValueError, KeyError) as error:
            self.drop(key, str(error))
            return None

    def put(self, key: str, record: Record) -> None:
        """Keeps a record: on disk, or in this process where the folder cannot be written."""
        if self._disk.put(key, {_PART: record.to_bytes()}):
            _unwritten.pop((self.folder, key), None)
        else:
            _unwritten[self.folder, key] = record

    def drop(self, key: str, why: str) -> None:
        """Removes a record that cannot be used."""
        log.warning("dropped an unusable record of tuning, %s: %s", key[:12], why)
        _unwritten.pop((self.folder, key), None)
        self._disk.drop(key)

    def state(self) -> str:
        """Returns what identifies all records: compiled code depends on them."""
        digest = hashlib.sha256()
        for name in self._disk.list_files(".bin"):
            data = self._disk.read_file(name)
            if data is not None:  # else another process has just dropped it
                digest.update(name.encode() + data)
        for (folder, key), record in sorted(_unwritten.items(), key=lambda entry: entry[0]):
            if folder == self.folder:
                digest.update(key.encode() + record.to_bytes())
        return digest.hexdigest()[:16]


_unwritten: dict[tuple[Path, str], Record] = {}
