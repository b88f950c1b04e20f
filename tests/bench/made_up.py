"""Runs that nobody measured, for what is made of runs."""

import random
from collections.abc import Sequence
from typing import Any

from dynamo_backends.bench.cells import Cell, Outcome, Run, Speedup
from dynamo_backends.bench.statistics import p_of_pairs
from dynamo_backends.workers.statistics import speedup

CONTEXT: dict[str, Any] = {
    "processor": "a processor",
    "torch_threads": 2,
    "versions": {"torch": "2.13.0", "jax": None},
    "suite": "/somewhere/models.py:models",
    "date": "2026-11-25",
}


def passing(
    ratio: float,
    seed: int = 0,
    rounds: int = 20,
    noise: float = 0.01,
    chosen: tuple[str, ...] = (),
) -> Outcome:
    """A backend that is so many times as fast as eager."""
    random_ = random.Random(seed)
    eager = [0.010 * random_.lognormvariate(0, noise) for _ in range(rounds)]
    backend = [0.010 / ratio * random_.lognormvariate(0, noise) for _ in range(rounds)]
    found = speedup(eager, backend)
    return Outcome(
        "pass",
        eager_s=tuple(eager),
        backend_s=tuple(backend),
        speedup=Speedup(found.value, found.low, found.high, p_of_pairs(eager, backend)),
        compile_cold_s=2.0,
        compile_warm_s=1.0,
        peak_eager=300_000_000,
        peak_backend=400_000_000,
        ops_on_backend=20,
        ops_fallback=1,
        ops_outside=2,
        graphs=1,
        breaks=0,
        load=0.1,
        chosen=chosen,
        seconds=3.0,
    )


def failing(status: Any = "fail_to_run", reason: str = "", stage: str = "compile") -> Outcome:
    """One that does not pass."""
    return Outcome(status, stage, reason, seconds=3.0)


def run_of(outcomes: dict[tuple[str, str], Outcome], left: Sequence[Cell] = ()) -> Run:
    """A run, by model and backend."""
    cells = {Cell(*key): outcome for key, outcome in outcomes.items()}
    return Run(dict(CONTEXT), [*cells, *left], cells, "dynamo-backends bench models.py:models")
