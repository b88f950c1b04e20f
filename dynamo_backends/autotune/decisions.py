"""Stores decisions on disk, as JSON files that processes and machines can share.

One file per decision, written whole under its key: a hash of the graph, its inputs, the machine,
and all versions. A file that is damaged, or is not what its name says, is ignored with a warning,
and the graph is tuned anew.
"""

import dataclasses
import functools
import hashlib
import json
import logging
import os
import platform
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx

from dynamo_backends.interface.notebooks import candidates_html, fields_html
from dynamo_backends.interface.report import CandidateReport
from dynamo_backends.runtime.cache import DiskCache, cache_folder, source_digest
from dynamo_backends.runtime.cpu_info import cpu_family, cpu_isa_level, cpu_name

log = logging.getLogger("dynamo_backends")

FORMAT = 1
_AGAIN_S = 3600.0
_ALWAYS_BUSY = 3
_KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Decision:
    """The winner of a tuning session, with the measurements of all candidates.

    Attributes:
        key: What it was decided for (see `hash_json`), a hash.
        winner: Name of the candidate.
        candidates: Every candidate and what became of it.
        graph: "inference", "forward", "backward" or "training".
        ops: Number of calls in the graph.
        inputs: Data types and shapes of the inputs that are no weights.
        objective: Objective of the options.
        precision: Precision of the options.
        mutated: Positions of the inputs that the graph writes to.
        environment: The machine and versions (see `collect_environment`).
        created: Seconds since 1970.
        short_of_s: Seconds of the budget, if that did not last for all candidates; else 0.
        seconds: Where the time of tuning went (see `GraphReport.tuning_seconds`).
        lines: The user's lines that the graph came from when it was tuned, "file:line, code", the
            ones with most calls first.
        features: See `graph_work`.
        disturbed: So many times in a row was the machine busy while candidates were raced, this
            time included; 0: it was quiet.
    """

    key: str
    winner: str
    candidates: tuple[CandidateReport, ...]
    graph: str
    ops: int
    inputs: tuple[str, ...]
    objective: str
    precision: str
    mutated: tuple[int, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    created: float = field(default_factory=time.time)
    short_of_s: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    lines: tuple[str, ...] = ()
    features: Mapping[str, float] = field(default_factory=dict)
    disturbed: int = 0

    def is_valid_for(self, names: Collection[str], budget_s: float) -> bool:
        """Returns whether the decision can be reused, or the graph must be tuned again.

        One that was made on a busy machine does for an hour, or if that happened three times in a
        row: this machine is always busy.

        Args:
            names: Names of the candidates that there are.
            budget_s: Seconds that may be spent; with more than it was made with, candidates that
                it left out for want of time may win.
        """
        fresh = time.time() - self.created < _AGAIN_S
        settled = fresh or self.disturbed in (0, _ALWAYS_BUSY)
        return settled and self.winner in names and not 0 < self.short_of_s < budget_s

    def _repr_html_(self) -> str:
        """Returns it for Jupyter."""
        names = ("winner", "inputs", "objective", "precision", "seconds", "lines", "environment")
        title = f"{self.graph} graph with {self.ops} calls"
        shown = {name: getattr(self, name) for name in names}
        return fields_html(title, shown) + candidates_html(self.candidates)

    def to_dict(self) -> dict[str, Any]:
        """Converts the decision to JSON-serializable types."""
        return {"format": FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, given: Any) -> "Decision":
        """Makes a decision from the result of `to_dict`.

        Raises:
            ValueError: It is not the dict of a decision; the message says why.
        """
        if not isinstance(given, dict) or given.get("format") != FORMAT:
            raise ValueError(f"it does not have the format {FORMAT}")
        hints = {f.name: f for f in dataclasses.fields(cls)}
        values = {name: given[name] for name in hints if name in given}
        missing = [name for name in _TYPES if not isinstance(values.get(name), _TYPES[name])]
        if missing:
            raise ValueError(f"{missing[0]!r} is missing or wrong")
        if not _KEY.fullmatch(values["key"]):
            raise ValueError("its key is not a hash")
        values["candidates"] = tuple(map(CandidateReport.from_dict, values["candidates"]))
        values["inputs"] = tuple(map(str, values["inputs"]))
        values["lines"] = tuple(map(str, values.get("lines", ())))
        values["mutated"] = tuple(map(int, values["mutated"]))
        values["short_of_s"] = float(values.get("short_of_s", 0.0))
        values["disturbed"] = min(int(values.get("disturbed", 0)), _ALWAYS_BUSY)
        for numbers in ("seconds", "features"):
            of_names = dict(values.get(numbers, {}))
            values[numbers] = {str(name): float(number) for name, number in of_names.items()}
        if values["winner"] not in {c.name for c in values["candidates"]}:
            raise ValueError("its winner is not one of its candidates")
        return cls(**values)


_TYPES: dict[str, type | tuple[type, ...]] = {
    "key": str,
    "winner": str,
    "candidates": list,
    "graph": str,
    "ops": int,
    "inputs": list,
    "objective": str,
    "precision": str,
    "mutated": list,
    "environment": dict,
    "created": (int, float),
}


class DecisionStore:
    """Stores tuning decisions on disk: one JSON file per key.

    Args:
        folder: By default "decisions" in the cache folder.
    """

    def __init__(self, folder: Path | None = None):
        self.folder = folder if folder is not None else cache_folder() / "decisions"
        self._disk = DiskCache(self.folder, what="autotune's decisions")

    def get(self, key: str) -> Decision | None:
        """Returns the decision with that key; None if it is absent or damaged."""
        decision = self._read(f"{key}.json")
        return decision if decision is not None and decision.key == key else None

    def put(self, decision: Decision) -> bool:
        """Writes a decision; returns False, and warns, if the folder is not writable."""
        text = json.dumps(decision.to_dict(), indent=1)
        return self._disk.write_file(f"{decision.key}.json", text.encode())

    def drop(self, key: str) -> None:
        """Removes a decision if it exists."""
        self._disk.remove_file(f"{key}.json")

    def all(self) -> list[Decision]:
        """Returns all undamaged decisions, the newest first."""
        found = filter(None, map(self._read, self._disk.list_files(".json")))
        return sorted(found, key=lambda d: -d.created)

    def clear(self) -> int:
        """Removes all decisions, damaged ones too; returns their number."""
        names = self._disk.list_files(".json")
        for name in names:
            self._disk.remove_file(name)
        return len(names)

    def merge_newer(self, decisions: Iterable[Decision]) -> int:
        """Adds another machine's decisions where none is newer here; returns the number added."""
        taken = 0
        for decision in decisions:
            here = self.get(decision.key)
            if here is None or here.created < decision.created:
                taken += self.put(decision)
        return taken

    def _read(self, name: str) -> Decision | None:
        data = self._disk.read_file(name)
        if data is None:
            return None
        try:
            decision = Decision.from_dict(json.loads(data))
            if f"{decision.key}.json" != name:
                raise ValueError("its key does not match the file name")
        except (ValueError, TypeError) as error:
            path = self.folder / name
            log.warning("ignored an unusable decision of autotune, %s: %s", path, error)
            return None
        return decision


# What a decision depends on.

_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+")


def captured_fingerprint(captured: fx.GraphModule) -> str | None:
    """Hashes what a captured graph computes; the hash is the same in every process.

    Returns:
        None if the graph has something in it whose identity another process could not tell.
    """
    lines: list[str] = []
    _describe_graph(captured, lines)
    if any(_ADDRESS.search(line) for line in lines):
        return None
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _describe_graph(module: fx.GraphModule, lines: list[str]) -> None:
    number = {node: i for i, node in enumerate(module.graph.nodes)}
    for node in module.graph.nodes:
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: cast(Any, _Reference(number[n])))
        target = "" if node.op in ("placeholder", "output") else qualified_name(node.target)
        value = node.meta.get("example_value", node.meta.get("val"))
        if node.op == "get_attr":
            target, value = "", functools.reduce(getattr, str(node.target).split("."), module)
            if isinstance(value, fx.GraphModule):
                _describe_graph(value, lines)
                value = None
        lines.append(f"{node.op} {target} {arguments!r} {value_signature(value)}")


class _Reference:
    def __init__(self, number: int):
        self._number = number

    def __repr__(self) -> str:
        return f"%{self._number}"


def qualified_name(target: Callable[..., Any] | str) -> str:
    """Returns a function's importable name, module included; for a method its name.

    Names that torch re-exports are kept short: "torch.nn.functional.linear".
    """
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
        return str(target)
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    if name is None:
        return repr(target)
    return f"{getattr(target, '__module__', None) or 'torch'}.{name}"


def value_signature(value: Any) -> str:
    """Returns a value's type; for tensors also dtype, shape, strides and device."""
    if isinstance(value, Tensor):
        strides = list(value.stride()) if value.layout == torch.strided else value.layout
        grad = ",grad" if value.requires_grad else ""
        return f"{value.dtype}{list(value.shape)}{strides}{value.device}{grad}"
    if isinstance(value, list | tuple):
        return "(" + ",".join(map(value_signature, value)) + ")"
    return type(value).__name__


def collect_environment(device_types: Sequence[str]) -> dict[str, Any]:
    """Returns versions, processor, cores, threads and devices, for decision keys."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "dynamo_backends": source_digest(),
        "processor": cpu_name(),
        "processor_class": cpu_isa_level(),
        "processor_family": cpu_family(),
        "cores": _cores(),
        "threads": torch.get_num_threads(),
        "devices": [_device(kind) for kind in sorted(set(device_types))],
    }


def hash_json(parts: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of a JSON-serializable dict, as hexadecimal text."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _device(kind: str) -> str:
    if kind == "cuda" and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return f"{torch.cuda.get_device_name()} sm_{major}{minor} CUDA {torch.version.cuda}"
    return kind
