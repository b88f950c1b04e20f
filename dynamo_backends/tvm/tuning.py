"""Tuning: measures schedules of each fused function, and uses the fastest that are known.

The functions that take longest come first and get most of the trials. A schedule is used if its
results are those of the default one and it is certainly faster; otherwise the default one is.
"""

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

from dynamo_backends.interface.errors import error_lines
from dynamo_backends.interface.logs import filter_stderr
from dynamo_backends.tvm.measuring import signature
from dynamo_backends.tvm.program import PREPARE
from dynamo_backends.tvm.records import Record, Records
from dynamo_backends.tvm.schedules import apply_default_schedule
from dynamo_backends.tvm.search import replayed, structural_fingerprint
from dynamo_backends.tvm.session import CHATTER, Settings, describe_host, vector_lanes
from dynamo_backends.tvm.vendor import relax, tvm
from dynamo_backends.workers.budget import Budget, budget_of
from dynamo_backends.workers.progress import Progress, showing
from dynamo_backends.workers.worker_process import ProcessLostError, WorkerProcess

log = logging.getLogger("dynamo_backends")

TRIAL_S = 30.0
"""A trial that takes longer is ended."""

_FINALISTS = 2
"""So many schedules are compared with the default one in the end."""

_AGAIN_S = 3600.0  # after a busy machine
_LOST = 3
"""After so many lost processes there are no more trials of a function."""

START_S = 300
"""For the imports of the process in which schedules are measured, and a function's default one."""


class MeasuringProcess(WorkerProcess):
    """The process that measures schedules (see `worker`)."""

    def __init__(self) -> None:
        super().__init__(("-m", "dynamo_backends.tvm.worker"))


@dataclass
class Counts:
    """The counters of tuning in this process.

    Attributes:
        trials: Schedules that were proposed and measured, or failed.
        functions: Functions that were tuned.
        lost: Processes that crashed or took too long.
    """

    trials: int = 0
    functions: int = 0
    lost: int = 0


COUNTS = Counts()

_DEFAULT = Record(None, "")


@dataclass(frozen=True)
class Outcome:
    """The outcome of tuning a module.

    Attributes:
        module: Its functions with a known schedule have it.
        tuned: How many that are.
        settled: There is nothing left to tune, with these settings.
    """

    module: Any
    tuned: int
    settled: bool


@dataclass(frozen=True)
class Function:
    """A fused function that may be tuned.

    Attributes:
        name: In its module.
        function: Not scheduled.
        inputs: How many of its parameters are inputs.
        calls: How often a call of the graph calls it.
        key: Key of its record: a hash of it and of its default schedule.
    """

    name: str
    function: Any
    inputs: int
    calls: int
    key: str


def apply_tuned_schedules(module: Any, settings: Settings) -> Outcome:
    """Applies the fastest known schedules to functions; tunes them first if asked.

    Args:
        module: Fused functions, and Relax functions that call them.
        settings: Whether to tune, and how much.
    """
    records = records_of(settings.threads)
    if not settings.uses_records or (not settings.tune_trials and records.empty):
        return Outcome(module, 0, True)
    with filter_stderr(CHATTER):
        functions = _functions(module, settings.threads)
    settled = True
    if settings.tune_trials:
        known = {f.key: records.get(f.key) for f in functions}
        wanted = [f for f in functions if _is_open(known[f.key], settings)]
        settled = not wanted and not any(record and record.again_at for record in known.values())
        if wanted:
            _Tuning(wanted, records, settings).run()
    with filter_stderr(CHATTER):
        count = sum(_apply(module, each, records, settings.threads) for each in functions)
    if not settled:
        log.info("tvm: %d of %d functions have a tuned schedule", count, len(functions))
    return Outcome(module, count, settled)


def records_of(threads: int) -> Records:
    """Returns the records of this machine, for programs of so many threads."""
    return Records(f"{tvm.__version__} {describe_host()} {threads}")


def _is_open(record: Record | None, settings: Settings) -> bool:
    return record is None or not record.meets(settings.tune_trials)


def _functions(module: Any, threads: int) -> list[Function]:
    """Returns the functions that calls of the graph call, and that can be tuned."""
    calls: Counter[str] = Counter()
    inputs: dict[str, int] = {}
    call_tir = tvm.ir.Op.get("relax.call_tir")

    def visit(node: Any) -> None:
        if not isinstance(node, relax.Call) or node.op != call_tir or len(node.args) != 2:
            return
        callee, arguments = node.args
        if isinstance(arguments, relax.Tuple):
            calls[str(callee.name_hint)] += 1
            inputs[str(callee.name_hint)] = len(arguments.fields)

    for name, function in module.functions_items():
        if isinstance(function, relax.Function) and name.name_hint != PREPARE:
            relax.analysis.post_order_visit(function.body, visit)
    functions = []
    for name, count in calls.items():
        function = module[name]
        if not isinstance(function, tvm.tirx.PrimFunc):
            continue
        if "tirx.is_scheduled" not in function.attrs and _can_be_tuned(function):
            functions.append(Function(name, function, inputs[name], count, _key(function, threads)))
    return functions


def _can_be_tuned(function: Any) -> bool:
    if relax.analysis.has_reshape_pattern(function):  # it becomes a view
        return False
    try:
        for parameter in function.params:
            signature(parameter)
    except ValueError:
        return False
    return True


def _key(function: Any, threads: int) -> str:
    default = apply_default_schedule(function, threads, vector_lanes())
    return hashlib.sha256(
        f"{structural_fingerprint(function)} {structural_fingerprint(default)}".encode()
    ).hexdigest()


def _apply(module: Any, each: Function, records: Records, threads: int) -> bool:
    """Gives a function the schedule of its record, if it has one."""
    record = records.get(each.key)
    if record is None or record.trace is None:
        return False
    try:
        made = replayed(each.function, record.trace, threads)
        if made.mark != record.mark:
            raise ValueError("its tuning record does not fit this function")
    except Exception as error:
        records.drop(each.key, error_lines(error)[-1])
        return False
    module[each.name] = made.function
    return True


@dataclass
class _Standing:
    """The results of the trials of a function.

    Attributes:
        trials: So many at most.
        done: So many there were.
        finished: There will be no more.
        best: Seconds and traces of the fastest ones.
    """

    trials: int
    done: int = 0
    finished: bool = False
    best: list[tuple[float, Any]] = field(default_factory=list)

    @property
    def left(self) -> bool:
        """Returns whether there may be another trial."""
        return self.done < self.trials and not self.finished

    def add(self, seconds: float, trace: Any) -> None:
        """Takes up a schedule that was measured."""
        self.best.append((seconds, trace))
        self.best = sorted(self.best, key=itemgetter(0))[:_FINALISTS]

    def gain(self, default: float) -> str:
        """Returns what has been gained so far, in words."""
        return (
            (f", {default / self.best[0][0]:.2f} times as fast as the default") if self.best else ""
        )


class _Tuning:
    """The tuning of one module.

    Args:
        functions: To be tuned.
        records: Where what is found is kept.
        settings: How much is tuned.
    """

    def __init__(self, functions: Sequence[Function], records: Records, settings: Settings):
        self._functions = functions
        self._records = records
        self._settings = settings
        self._budget = time_budget(settings)
        self._trials = settings.tune_trials
        self._seeds = 0

    def run(self) -> None:
        """Tunes until all functions are, or the budget is spent, or the user stops it."""
        with showing("tvm: tuning") as say, self._budget.spending(), MeasuringProcess() as process:
            try:
                self._run(process, say)
            except KeyboardInterrupt:
                self._budget.total_s = 0
                records = (self._records.get(f.key) for f in self._functions)
                log.warning(
                    "tvm: tuning was interrupted after %d of %d functions and stops in this "
                    "process; its results are saved. Press Ctrl-C again to end the program",
                    sum(not _is_open(record, self._settings) for record in records),
                    len(self._functions),
                )

    def _run(self, process: MeasuringProcess, say: Progress) -> None:
        costs = self._costs(process, say)
        left = sum(costs.values())
        for each in sorted(costs, key=lambda f: -costs[f]):
            if not self._budget.left_s:
                break
            share = min(costs[each] / left, 1.0) if left else 1.0
            left -= costs[each]
            trials = min(self._trials, max(1, round(self._trials * share)))
            if trials:
                self._tune(each, trials, share, process, say)
            else:
                known = self._records.get(each.key) or _DEFAULT
                self._records.put(each.key, replace(known, goal=self._settings.tune_trials))

    def _costs(self, process: MeasuringProcess, say: Progress) -> dict[Function, float]:
        """Seconds that functions take in a call of the graph, with their default schedules."""
        costs: dict[Function, float] = {}
        for number, each in enumerate(self._functions, 1):
            if not self._budget.left_s:
                break
            say(f"tvm: tuning: timing function {number} of {len(self._functions)}")
            seconds = self._open(each, process)
            if seconds is None:
                self._records.put(each.key, replace(_DEFAULT, goal=self._settings.tune_trials))
            else:
                costs[each] = seconds * each.calls
        return costs

    def _open(self, each: Function, process: MeasuringProcess) -> float | None:
        """Seconds of a function with its default schedule; None if it cannot be measured."""
        self._seeds += 1
        request = {
            "do": "open",
            "function": each.function.script(),
            "expected": structural_fingerprint(each.function),
            "inputs": each.inputs,
            "threads": self._settings.threads,
            "seed": self._seeds,
        }
        return _asked(process, request, START_S).get("seconds")

    def _tune(
        self, each: Function, trials: int, share: float, process: MeasuringProcess, say: Progress
    ) -> None:
        """Measures schedules of a function, and keeps what is found.

        Args:
            each: The function.
            trials: So many at most.
            share: Share of the time that is left.
            process: Where.
            say: Shows progress.
        """
        COUNTS.functions += 1
        standing = _Standing(trials)
        try:
            self._attempt(each, standing, share, process, say)
        except KeyboardInterrupt:
            if standing.best:
                say(
                    f"tvm: tuning {each.name}: comparing the fastest schedules (Ctrl-C again to "
                    "skip)"
                )
                self._keep(each, standing, process)
            raise
        say(f"tvm: tuning {each.name}: comparing the fastest schedules")
        self._keep(each, standing, process)

    def _attempt(
        self,
        each: Function,
        standing: "_Standing",
        share: float,
        process: MeasuringProcess,
        say: Progress,
    ) -> None:
        """Measures schedules of a function."""
        lost = 0
        until = self._budget.left_s * (1 - share)
        default = self._open(each, process)
        while standing.left and default is not None and self._budget.left_s > until:
            at = f"trial {standing.done + 1} of {standing.trials}"
            say(f"tvm: tuning {each.name}: {at}{standing.gain(default)}")
            standing.done += 1
            self._trials -= 1
            COUNTS.trials += 1
            answer = _asked(process, {"do": "attempt"}, TRIAL_S)
            if "exhausted" in answer:
                standing.finished = True
            elif "seconds" in answer:
                standing.add(answer["seconds"], answer["trace"])
            elif not process.running:
                lost += 1
                standing.finished = lost == _LOST
                default = self._open(each, process)
        if not standing.left or default is None:
            standing.finished = True

    def _keep(self, each: Function, standing: "_Standing", process: MeasuringProcess) -> None:
        record, certain = self._decide(each, [trace for _, trace in standing.best], process)
        goal = self._settings.tune_trials if standing.finished else 0
        again_at = 0.0 if certain else time.time() + _AGAIN_S
        record = replace(record, trials=standing.done, goal=goal, again_at=again_at)
        self._records.put(each.key, record)

    def _decide(
        self, each: Function, traces: list[Any], process: MeasuringProcess
    ) -> tuple[Record, bool]:
        """Returns the schedule that is faster than the default one, or the default one.

        And whether that is certain: else the machine was busy, and it is tuned again later.
        """
        known = self._records.get(each.key) or _DEFAULT
        if known.trace is not None:
            traces = [*traces, known.trace]
        if not traces or not (process.running or self._open(each, process)):
            return known, True
        answer = _asked(process, {"do": "decide", "traces": traces}, START_S)
        if "winner" not in answer:
            return known, not answer.get("disturbed", False)
        if answer["winner"] is None:
            return _DEFAULT, True
        value, low, high = answer["speedup"]
        mark = answer["mark"]
        return Record(traces[answer["winner"]], mark, speedup=(value, low, high)), True


def _asked(process: MeasuringProcess, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
    """Returns an answer; a "problem" if the process was lost."""
    try:
        answer = process.ask(request, limit_s)
    except ProcessLostError as lost:
        COUNTS.lost += 1
        answer = {"problem": str(lost)}
    if "problem" in answer:
        log.debug("tvm: tuning: %s", answer["problem"])
    return answer


def time_budget(settings: Settings) -> Budget:
    """Returns the one budget of this process for these settings."""
    return budget_of("tvm tuning", settings.tune_budget_s)
