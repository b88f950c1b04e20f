"""What calls take while another process tunes beside them, and what that finds.

    python benchmarks/background.py --json background.json  # a call with the same file goes on
    python benchmarks/background.py --models gpt2 --budget 20 --load 0.8
    python benchmarks/background.py --json background.json --minutes 30  # begins none later

Eight models, each in two processes with empty cache folders: one tunes in its first call
(`mode="wait"`), and one is called while another process tunes (`mode="background"`), with pauses
between the calls: these take a part of the time (`--load`), and the other process has the rest.
Calls in eager with such pauses, before, are what those are compared with; the call that is captured
does not count. Then eager and the winner are timed in turns, as after "wait". The budget of "wait"
is in seconds that pass, that of the other process the same number of seconds of processors.

The exit status is 1 if, for any model, the 95th percentile of calls during tuning exceeds 1.1 times
that of eager and 5 ms; if the winner serves later than 1.5 times after "wait"; if the speed after
the switch is less than 95% of that of "wait", beyond doubt; or if a result is wrong.
"""

import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from rich.table import Table

import dynamo_backends
import harness
from dynamo_backends.bench.results_files import ResultError
from dynamo_backends.bench.suites.case import call
from harness.calls import milliseconds, seconds
from harness.kept import Results

SUITES = ("classic", "transformers")
MODELS = (
    "resnet18", "mobilenet_v2", "squeezenet1_1", "bert", "gpt2", "distilbert", "swin", "convnext",
)  # fmt: skip
MODES = ("wait", "background")
WARM, ALONE = 5, 40  # calls in eager before
TIMES_EAGER, PLUS_S = 1.1, 5e-3
TIMES_WAIT = 1.5
OF_WAIT = 0.95
HEADS = (
    "model", "eager p50, p95 ms", "during p50, p95, p99, max", "calls", "limit ms", "over",
    "s until it serves", "s, wait", "× eager", "×, wait", "chosen", "wait",
)  # fmt: skip
DEPEND = ("scale", "batch", "rounds", "budget", "load", "candidates")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.model_arguments(__doc__, rounds=20, models=MODELS)
    parser.add_argument("--budget", type=float, default=60, help="budget_s of autotune")
    parser.add_argument("--load", type=float, default=0.2, help="part of the time that calls take")
    parser.add_argument("--candidates", nargs="*", default=[], help="of autotune; default: all")
    parser.add_argument("--patience", type=float, default=600, help="seconds for one model to tune")
    parser.add_argument("--minutes", type=float, help="begin no measurement later than that")
    settings = parser.parse_args(arguments)
    console = harness.announce()
    try:
        models = harness.named_models(settings, SUITES)
        kept = harness.Kept(settings, "background", DEPEND)
    except (ValueError, ResultError) as error:
        return harness.refused(error, console)
    how = {name: getattr(settings, name) for name in (*DEPEND, "patience")}
    names = [f"{model}/{mode}" for model in models for mode in MODES]
    kept.measure_left(names, lambda name: in_a_process(name, how), console)
    console.print(table(models, kept.results))
    return kept.status([x for model in models for x in problems(model, kept.results)], console)


def in_a_process(name: str, how: Mapping[str, Any]) -> Any:
    """Measures a model in one mode in a fresh process with empty caches."""
    return harness.call_apart(measured, name, how, timeout_s=how["patience"] + 600)


@torch.no_grad()
def measured(name: str, how: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of one model in one mode."""
    suite, model_name, mode = name.split("/")
    case = harness.find_case(suite, model_name, how["scale"], how["batch"])
    model, inputs = case.make(), case.inputs()
    eager = functools.partial(call, model, inputs)
    pause_s = float(np.median([seconds(eager) for _ in range(WARM)])) * (1 / how["load"] - 1)
    alone = [seconds(eager, pause_s) for _ in range(ALONE if mode == "background" else WARM)]
    options = {"budget_s": how["budget"], "mode": mode, "candidates": how["candidates"]}
    compiled = torch.compile(model, backend="autotune", options=options)
    run = functools.partial(call, compiled, inputs)
    with dynamo_backends.record() as reports:
        during, tuned_s = until_tuned(run, pause_s, how["patience"])
    timings = harness.time_candidates({"eager": eager, "winner": run}, how["rounds"])
    ratio = timings["winner"].speedup
    limit = TIMES_EAGER * float(np.percentile(alone, 95)) + PLUS_S
    return {
        "alone_ms": milliseconds(alone, 50, 95),
        "during_ms": milliseconds(during, 50, 95, 99, 100),
        "calls": len(during),
        "over": sum(t > limit for t in during),
        "limit_ms": limit * 1e3,
        "tuned_s": tuned_s,
        "speedup": ratio.value,
        "speedup_95": [ratio.low, ratio.high],
        "chosen": sorted({r.chosen for r in reports if r.chosen}),
        "status": [str(status) for status in dynamo_backends.tuning_status()],
        "error": harness.check(model, compiled, inputs).detail,
    }


def until_tuned(
    run: Callable[[], Any], pause_s: float, patience_s: float
) -> tuple[list[float], float]:
    """Seconds of the calls after the first until tuning has ended, and when that was.

    Raises:
        SystemExit: It does not end.
    """
    start = time.perf_counter()
    run()
    times: list[float] = []
    while not dynamo_backends.wait_for_tuning(pause_s):
        if time.perf_counter() - start > patience_s:
            raise SystemExit(f"not tuned after {patience_s:g} s")
        times.append(seconds(run))
    return times, time.perf_counter() - start


def table(models: Sequence[str], results: Results) -> Table:
    """One line per model."""
    rows = []
    for model in models:
        wait, beside = (results.get(f"{model}/{mode}", {}) for mode in MODES)
        rows.append([model.partition("/")[2], *cells(beside, wait)])
    shown = harness.table(HEADS, rows)
    for column in shown.columns[1:3]:
        column.no_wrap = True
    return shown


def published(content: Mapping[str, Any]) -> list[Table]:
    """The table of results that were kept."""
    results = content["results"]
    return [table(list(dict.fromkeys(name.rpartition("/")[0] for name in results)), results)]


def cells(beside: Mapping[str, Any], wait: Mapping[str, Any]) -> list[str]:
    """What a table shows of a model; "-" for what was not measured."""
    calls = ["-"] * 5
    if "alone_ms" in beside:
        times = [", ".join(f"{t:.1f}" for t in beside[n]) for n in ("alone_ms", "during_ms")]
        calls = [*times, str(beside["calls"]), f"{beside['limit_ms']:.1f}", str(beside["over"])]
    both = [row if "speedup" in row else None for row in (beside, wait)]
    return [
        *calls,
        *("-" if row is None else f"{row['tuned_s']:.0f}" for row in both),
        *("-" if row is None else f"{row['speedup']:.2f}" for row in both),
        *("-" if row is None else ", ".join(row["chosen"]) for row in both),
    ]


def problems(model: str, results: Results) -> list[str]:
    """What is not as it should be with a model."""
    rows = {mode: results[f"{model}/{mode}"] for mode in MODES if f"{model}/{mode}" in results}
    found = [f"{model}/{mode}: {row['error']}" for mode, row in rows.items() if row.get("error")]
    beside, wait = rows.get("background", {}), rows.get("wait", {})
    if beside.get("during_ms", [0, 0])[1] > beside.get("limit_ms", 0):
        p95, limit = beside["during_ms"][1], beside["limit_ms"]
        found.append(
            f"{model}: 95% of the calls during tuning take up to {p95:.1f} ms, not {limit:.1f}"
        )
    if "speedup" not in beside or "speedup" not in wait:
        return found
    if beside["tuned_s"] > TIMES_WAIT * wait["tuned_s"]:
        ratio = beside["tuned_s"] / wait["tuned_s"]
        found.append(f"{model}: the winner serves after {ratio:.2f} times the seconds of 'wait'")
    if beside["speedup_95"][1] < OF_WAIT * wait["speedup_95"][0]:
        reached, expected = beside["speedup"], wait["speedup"]
        found.append(f"{model}: {reached:.2f} times as fast as eager, after 'wait' {expected:.2f}")
    return found


if __name__ == "__main__":
    sys.exit(main())
