"""Times code against eager, caches the verdict, and switches to eager if slower."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import torch
from torch import Tensor

from dynamo_backends.graph.graph import Graph, source_line
from dynamo_backends.interface.report import GraphReport, SpeedReport
from dynamo_backends.runtime.cache import DiskCache, cache_folder
from dynamo_backends.runtime.cpu_info import cpu_cache_key, cpu_name
from dynamo_backends.runtime.eager_switch import EagerSwitch
from dynamo_backends.runtime.speed_timing import SpeedVerdict, TimedCalls, TimedRuns
from dynamo_backends.verify.first_call import why_not_repeatable
from dynamo_backends.workers.contention import (
    processors,
)

FOLDER = "pace"
"""In the cache folder."""

_LIMIT = 16 << 20  # bytes

REMEDY = (
    'Another backend may be faster: try backend="autotune". Pass slow="off" to keep compiled code '
    "without measuring it."
)


class SpeedCheck:
    """Times one graph's code against eager, reports it, and switches if slower.

    Args:
        report: Of the graph.
        slow: See `Options.slow`; not "off".
        key: See `speed_cache_key`; None: nothing is kept.
        unmeasured: Why nothing can be measured; empty: no reason is known.

    Attributes:
        reports: Where it is noted.
    """

    def __init__(self, report: GraphReport, slow: str, key: str | None, unmeasured: str = ""):
        self.reports = [report]
        self._slow = slow
        self._key = key
        self._unmeasured = unmeasured

    def make_timed_calls(
        self,
        graphs: Sequence[Graph],
        runs: TimedRuns,
        switch: EagerSwitch,
        settle: Callable[[bool], None],
    ) -> TimedCalls | None:
        """Returns a callable that times calls; None if nothing needs to be measured.

        Args:
            graphs: What eager runs.
            runs: The code.
            switch: Says that eager takes over.
            settle: Is told, at the end, whether it does.
        """
        report, part = self.reports[0], describe_operators(graphs)

        def note(verdict: SpeedVerdict, is_known: bool = False) -> bool:
            region, replaced = switch.region, False
            noted = SpeedReport(region, part, **asdict(verdict))
            if verdict.outcome == "slower":
                what = f"a {region} of {report.title} takes {noted.describe_times}: {part}"
                what = f"{report.backend}: {what}"
                replaced = switch.switch_if_slower(what, REMEDY, self._slow == "eager")
            noted = replace(noted, replaced=replaced)
            for each in self.reports:
                if not is_known or noted not in each.paces:
                    each.paces.append(noted)
            return replaced

        def found(verdict: SpeedVerdict) -> None:
            if self._key is not None:
                store_speed_verdict(self._key, verdict)
            settle(note(verdict))

        reason = self._unmeasured or unmeasurable_reason(graphs)
        known = SpeedVerdict("not measured", reason=reason) if reason else self.known_verdict()
        if known is not None:
            note(known, is_known=True)
            return None
        return TimedCalls(runs, found, lambda: report.compile_seconds / max(1, report.blocks))

    def known_verdict(self) -> SpeedVerdict | None:
        """Returns a cached verdict, perhaps of another process; None if there is none."""
        found = load_speed_verdict(self._key) if self._key is not None else None
        return found and replace(found, reason="according to an earlier measurement")


def unmeasurable_reason(graphs: Sequence[Graph]) -> str:
    """Returns why code cannot be timed against eager; empty if it can.

    Args:
        graphs: What eager would run.
    """
    for graph in graphs:
        places = [node.meta.get("val") for node in (*graph.placeholders, *graph.calls)]
        if any(isinstance(x, Tensor) and x.device.type != "cpu" for x in places):
            return "not all of its tensors are on the CPU"
        for node in graph.calls:
            if reason := why_not_repeatable(node):
                return reason
    return ""


def describe_operators(graphs: Sequence[Graph], most: int = 4) -> str:
    """Lists the most frequent operators of graphs, with a source line, as text.

    Args:
        graphs: What eager runs of it.
        most: So many are named.
    """
    calls = [n for g in graphs for n in g.calls if isinstance(n.target, torch._ops.OpOverload)]
    counts = Counter(str(node.target) for node in calls).most_common()
    named = [f"{count}x {name}" for name, count in counts[:most]]
    if len(counts) > most:
        named.append(f"{len(counts) - most} others")
    line = next(filter(None, map(source_line, calls)), None)
    return ", ".join(named) + (f", at {line}" if line else "")


def speed_cache_key(key: str) -> str:
    """Returns the cache key of a verdict: code, CPU and number of threads.

    Args:
        key: Of the compiled code.
    """
    machine = f"{cpu_name()} {cpu_cache_key()} {processors()} {torch.get_num_threads()}"
    return hashlib.sha256(f"pace {key} {machine}".encode()).hexdigest()


def load_speed_verdict(key: str) -> SpeedVerdict | None:
    """Loads a verdict from the disk cache; None if there is none.

    Args:
        key: See `speed_cache_key`.
    """
    parts = _kept().get(key)
    return SpeedVerdict(**json.loads(parts["pace"])) if parts is not None else None


def store_speed_verdict(key: str, verdict: SpeedVerdict) -> None:
    """Stores a verdict in the disk cache, if it is certain.

    Args:
        key: See `speed_cache_key`.
        verdict: What was found.
    """
    if verdict.outcome in ("slower", "fast enough") and not verdict.reason:
        _kept().put(key, {"pace": json.dumps(asdict(verdict)).encode()})


def _kept() -> DiskCache:
    return DiskCache(cache_folder() / FOLDER, _LIMIT, what="measured times of blocks")
