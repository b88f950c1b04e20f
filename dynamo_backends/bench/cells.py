"""Defines the cells of a benchmark run, how they are measured, and their outcomes."""

import math
from collections.abc import Iterable, Mapping, Sized
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

Mode = Literal["inference", "training", "step"]
MODES: tuple[Mode, ...] = get_args(Mode)

Status = Literal[
    "pass",
    "fail_accuracy",
    "fail_to_run",
    "not_compiled",
    "timeout",
    "OOM",
    "eager_two_runs_differ",
    "eager_fail_to_run",
]
STATUSES: tuple[Status, ...] = get_args(Status)

EAGER = "eager"
"""The backend that compiles nothing: what noise alone does to the figures."""

OF_EAGER: tuple[str, ...] = ("load", "eager", "reference")
"""Stages in which the backend has not been asked for anything yet."""


@dataclass(frozen=True, order=True)
class Cell:
    """One model with one backend.

    Attributes:
        model: Its name in the suite.
        backend: What compiles it, see `bench.backends`.
        mode: "inference"; "training": forward and backward; "step": the optimizer, too.
        dtype: A key of `bench.work.DTYPES`, of weights and inputs.
        batch: Examples per call; None: the suite's own number.
    """

    model: str
    backend: str
    mode: Mode = "inference"
    dtype: str = "float32"
    batch: int | None = None

    def __str__(self) -> str:
        """As progress shows it."""
        batch = "" if self.batch is None else f" batch {self.batch}"
        return f"{self.model} {short(self.backend)} {self.mode} {self.dtype}{batch}"


@dataclass(frozen=True)
class BenchConfig:
    """The suite, rounds, limits and device of a benchmark run.

    Attributes:
        suite: As the command line names it, see `bench.sources`.
        path: Path of torchbench's checkout; empty for other suites.
        scale: "bench" for sizes as published, "test" for small ones, where a suite has them.
        rounds: Samples of each.
        patience_s: Seconds after which no round begins, but there are always eight.
        threads: Threads of torch; None: as many as torch takes.
        timeout_s: Seconds that a process may take.
        memory_gb: Resident memory in GB (10^9 bytes) that a process and its children may have.
        device: Where models run, one of `bench.device.DEVICES`.
        accuracy: Only whether results are right is looked at: nothing is timed, and there is no
            second process.
    """

    suite: str
    path: str = ""
    scale: Literal["bench", "test"] = "bench"
    rounds: int = 20
    patience_s: float = 60.0
    threads: int | None = None
    timeout_s: float = 900.0
    memory_gb: float | None = None
    device: str = "cpu"
    accuracy: bool = False


@dataclass(frozen=True)
class Speedup:
    """Eager's median time over the backend's, from the same rounds.

    Attributes:
        value: The ratio.
        low: Lower end of its 95% confidence interval.
        high: Upper end.
        p: Probability of rounds that differ so much if both were as fast (Wilcoxon's signed-rank
            test on the logarithms); None: it was not tested.
    """

    value: float
    low: float
    high: float
    p: float | None = None


@dataclass(frozen=True)
class Outcome:
    """The outcome of a cell; times in seconds, memory in bytes, None if not measured.

    Attributes:
        status: As PyTorch's benchmark runners name it.
        stage: Which part of the measurement was under way at the end, "done" after the last.
        reason: What is wrong; empty if it passes.
        eager_s: Times of eager's calls, by round.
        backend_s: Times of the compiled model's calls, by round.
        speedup: From these.
        compile_cold_s: `torch.compile` and the first call, without anything in a cache.
        compile_warm_s: The same in a second process.
        peak_eager: Largest resident memory of a process that only runs eager; on a GPU what torch
            allocated there.
        peak_backend: The same of the second process, which compiles and runs the model.
        ops_on_backend: ATen calls that a backend of this package runs.
        ops_fallback: Those that it leaves to eager within its graphs.
        ops_outside: ATen calls of one call of the model outside Dynamo's graphs.
        seconds_outside: What these take.
        graphs: That Dynamo captured.
        breaks: The graph breaks.
        load: Processors' time that others took while the rounds ran: 1 is one processor.
        requests: That a call stands for, where the suite has streams of requests: a time is that of
            all of them.
        stream_cold_s: What all of them take with nothing in a cache.
        wrong: How many answers are not eager's.
        executables: That were made for them.
        recompilations: Graphs that Dynamo captured after the first request.
        p50_s: Median of the backend's answers, once all is compiled.
        p95_s: 95 of 100 answers take no longer.
        eager_p50_s: The same of eager.
        eager_p95_s: The same of eager.
        max_rel: Largest difference from eager within one output, relative to its largest value.
        chosen: Who runs each graph, where the backend chooses among candidates.
        note: What else there is to say.
        seconds: That measuring took.
    """

    status: Status
    stage: str = "done"
    reason: str = ""
    eager_s: tuple[float, ...] = ()
    backend_s: tuple[float, ...] = ()
    speedup: Speedup | None = None
    compile_cold_s: float | None = None
    compile_warm_s: float | None = None
    peak_eager: int | None = None
    peak_backend: int | None = None
    ops_on_backend: int | None = None
    ops_fallback: int | None = None
    ops_outside: int | None = None
    seconds_outside: float | None = None
    graphs: int | None = None
    breaks: int | None = None
    load: float | None = None
    requests: int | None = None
    stream_cold_s: float | None = None
    wrong: int | None = None
    executables: int | None = None
    recompilations: int | None = None
    p50_s: float | None = None
    p95_s: float | None = None
    eager_p50_s: float | None = None
    eager_p95_s: float | None = None
    max_rel: float | None = None
    chosen: tuple[str, ...] = ()
    note: str = ""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Returns whether the backend ran the model and its results are right."""
        return self.status == "pass"

    @property
    def eager_failed(self) -> bool:
        """Returns whether there is nothing that a backend could be compared with."""
        return self.status.startswith("eager_") or self.stage in OF_EAGER

    @property
    def memory_ratio(self) -> float | None:
        """Eager's peak over the backend's: PyTorch's runners call it the compression ratio."""
        if not self.peak_eager or not self.peak_backend:
            return None
        return self.peak_eager / self.peak_backend

    @property
    def ops_in_eager(self) -> int | None:
        """ATen calls that run in eager, within graphs and outside; None if neither is known."""
        known = [n for n in (self.ops_fallback, self.ops_outside) if n is not None]
        return sum(known) if known else None

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields with a value, for JSON."""
        empty = (None, "", ())
        return {name: value for name, value in asdict(self).items() if value not in empty}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> "Outcome":
        """Returns the reverse of `to_dict`.

        Raises:
            TypeError: It is not the dict of an outcome.
            ValueError: A value is none that it can have.
        """
        values = dict(given)
        for name in ("eager_s", "backend_s"):
            values[name] = tuple(map(float, values.get(name, ())))
        values["chosen"] = tuple(map(str, values.get("chosen", ())))
        if values.get("speedup") is not None:
            values["speedup"] = Speedup(**values["speedup"])
        if values.get("status") not in STATUSES:
            raise ValueError(f"{values.get('status')!r} is not a valid status")
        return cls(**values)


def short(name: str) -> str:
    """Shortens FILE.py:NAME to the file's base name; returns other names unchanged."""
    file, _, rest = name.rpartition(":")
    return f"{Path(file).name}:{rest}" if file.endswith(".py") else name


def as_ratio(value: float) -> str:
    """Returns a speedup as it is shown: two decimals, or two digits if it is small."""
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


@dataclass
class Run:
    """A benchmark run, finished or not.

    Attributes:
        context: What figures depend on: machine, versions, `BenchConfig`.
        cells: All that were asked for, in order.
        outcomes: Outcomes of those that were measured.
        command: What was typed.
    """

    context: dict[str, Any]
    cells: list[Cell]
    outcomes: dict[Cell, Outcome] = field(default_factory=dict)
    command: str = ""

    @property
    def left(self) -> list[Cell]:
        """The cells that were not measured yet."""
        return self.left_of(self.cells)

    def left_of(self, cells: Iterable[Cell]) -> list[Cell]:
        """Returns those of some cells that were not measured yet."""
        return [cell for cell in cells if cell not in self.outcomes]

    def seconds_for(self, cells: Sized) -> float:
        """Returns the predicted seconds of cells, from those that were measured, or NaN."""
        took = [outcome.seconds for outcome in self.outcomes.values()]
        return sum(took) / len(took) * len(cells) if took else math.nan
