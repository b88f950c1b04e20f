"""Learns what autotune expects of its candidates, from decisions that were recorded.

    python tools/priors.py learn                    # from tools/recorded, into the package
    python tools/priors.py learn fleet.json more.json --out table.json
    python tools/priors.py judge                    # how well it predicts models left out
    python tools/priors.py judge --json judged.json # and keep that, for a page
    python tools/priors.py keep times.json --out tools/recorded/zen4.json  # what is learned from

Files are what `dynamo-backends cache export` or `benchmarks/record_decisions.py` write, or records
with the same content (tools/recorded). Learning is scikit-learn's kernel ridge regression of what
speedups differ by from those that are written by hand; its width and ridge are those whose first
choice is the fastest on models that were left out. What runs reads the table with numpy alone
(dynamo_backends/autotune/priors).
"""

import argparse
import functools
import hashlib
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table as Shown
from sklearn.kernel_ridge import KernelRidge
from sklearn.model_selection import LeaveOneGroupOut
from sklearn.preprocessing import StandardScaler

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import harness  # noqa: E402
from dynamo_backends.autotune.decisions import Decision  # noqa: E402
from dynamo_backends.autotune.priors import Described, hand, machine_features  # noqa: E402
from dynamo_backends.autotune.priors.table import Learned, Table, added  # noqa: E402

RECORDED = ROOT / "tools" / "recorded"
TABLE = ROOT / "dynamo_backends" / "autotune" / "priors" / "table.json"

WIDTHS = (1.0, 2.0, 3.0, 5.0, 8.0)  # in standard deviations of features, over all of them
RIDGES = (0.03, 0.1, 0.3, 1.0)
MACHINE_SCALES = {  # differences that make another machine of it
    "avx2": 0.7, "avx512": 0.7, "vnni": 2.0, "bf16": 1.0, "fp16": 2.0, "amx": 0.7, "amd": 1.0,
    "intel": 1.0, "family": 2.0, "cores": 3.0, "threads": 1.5, "gpu": 0.2,
}  # fmt: skip
LEAST = 5  # records of a candidate, below which what is written by hand is better
LEARNT = "learnt from the others"
NEAR = 0.95  # of the best one's speed
_FIXED_S = 0.3  # as `autotune.cost` has it
_MACHINE = ("processor", "processor_class", "processor_family", "cores", "threads", "devices")


@dataclass(frozen=True)
class Record:
    """A graph on a machine.

    Attributes:
        model: Its name, or a hash of the graph's features.
        described: The graph and the machine.
        gains: Logarithms of speedups over eager, of the candidates that were right.
        tried: Whether each candidate was right.
        rates: Seconds of compilation per call.
    """

    model: str
    described: Described
    gains: Mapping[str, float]
    tried: Mapping[str, bool]
    rates: Mapping[str, float]


def main(arguments: Sequence[str] | None = None) -> int:
    """Learns or judges; returns 2 if there is nothing to learn from."""
    settings = parse(arguments)
    console = Console()
    if settings.action == "keep":
        kept = json.dumps(what_is_learned_from(settings.files), indent=1) + "\n"
        settings.out.write_text(kept, encoding="utf-8")
        return 0
    records = list(itertools.chain.from_iterable(map(read, settings.files)))
    if len({r.model for r in records}) < LEAST:
        console.print(f"[red]{len(records)} records are too few to learn from[/]")
        return 2
    width, ridge = best(records)
    learnt = learn(records, width, ridge, ", ".join(p.name for p in settings.files))
    console.print(f"{len(records)} graphs, width {width:g}, ridge {ridge:g}")
    found = []
    for title, group in (("models", by_model), ("machines", by_machine)):
        if len({group(r) for r in records}) > 1:
            rows = judged(records, held_out(records, width, ridge, group))
            found += [{"left_out": title, **row} for row in rows]
            console.print(shown(rows, title))
    if settings.json:
        harness.save_json(settings.json, "first choices", found, graphs=_graphs(records))
    if settings.action == "learn":
        settings.out.write_text(learnt.to_json(), encoding="utf-8")
        console.print(f"wrote {settings.out}")
    return 0


# Reading.


def read(path: Path) -> Iterator[Record]:
    """The records in a file: decisions with features, or records as such."""
    content = json.loads(path.read_text(encoding="utf-8"))
    models = content.get("models", {})
    for given in content.get("decisions", ()):
        decision = Decision.from_dict(given)
        if decision.features:
            yield of_decision(decision, models.get(decision.key, ""))
    for given in content.get("records", ()):
        yield of_record(given)


def what_is_learned_from(paths: Sequence[Path]) -> dict[str, Any]:
    """The decisions in files as records: without lines, rounds and whatever else is not learnt."""
    records = []
    for path in paths:
        content = json.loads(path.read_text(encoding="utf-8"))
        for decision in map(Decision.from_dict, content["decisions"]):
            record = {
                "model": content.get("models", {}).get(decision.key, decision.key[:12]),
                "kind": decision.graph,
                "ops": decision.ops,
                "features": decision.features,
                "environment": {n: x for n, x in decision.environment.items() if n in _MACHINE},
                "candidates": {
                    row.name: {
                        "speedup": round(row.speedup[0], 3),
                        "compile_s": round(row.compile_s or 0.0, 2),
                    }
                    for row in decision.candidates
                    if row.name != "eager" and row.speedup
                },
            }
            records.append(record)
    return {"source": ", ".join(path.name for path in paths), "records": records}


def of_decision(decision: Decision, model: str = "") -> Record:
    """A decision as a record; without a name equal graphs are one model."""
    rows = [row for row in decision.candidates if row.name != "eager"]
    digest = hashlib.sha256(json.dumps(dict(decision.features), sort_keys=True).encode())
    machine = machine_features(decision.environment)
    return Record(
        model or digest.hexdigest()[:12],
        Described(decision.graph, decision.ops, decision.features, machine),
        {r.name: math.log(r.speedup[0]) for r in rows if r.speedup and r.speedup[0] > 0},
        {r.name: r.seconds is not None for r in rows if r.compile_s is not None},
        {r.name: _rate(r.compile_s, decision.ops) for r in rows if r.compile_s is not None},
    )


def of_record(given: Mapping[str, Any]) -> Record:
    """A record that was written as such; what it does not say is not learnt."""
    ops, rows = int(given["ops"]), given["candidates"]
    return Record(
        given["model"],
        Described(given["kind"], ops, given["features"], machine_features(given["environment"])),
        {name: math.log(row["speedup"]) for name, row in rows.items()},
        dict.fromkeys(rows, True),
        {n: _rate(r["compile_s"], ops) for n, r in rows.items() if "compile_s" in r},
    )


def _rate(compile_s: float, ops: int) -> float:
    return max(compile_s - _FIXED_S, 0.01) / max(ops, 1)


# Learning.


def learn(records: Sequence[Record], width: float, ridge: float, source: str = "") -> Table:
    """The table of some records.

    Args:
        records: At least two.
        width: Distance at which one graph says little of another.
        ridge: The larger, the less single graphs count.
        source: Where they come from, for people.
    """
    table = frame(records, width, source)
    close = np.stack([table.closeness(r.described.graph, r.described.machine) for r in records])
    errors = held_out(records, width, ridge, by_model)
    kinds: dict[str, dict[str, Learned]] = {}
    for kind, name in sorted({(r.described.kind, n) for r in records for n in r.tried}):
        learned = fitted(records, close, kind, name, ridge)
        if learned is not None:
            off = [p - r.gains[name] for r, p in _pairs(records, errors, kind, name)]
            spread = max(0.05, math.sqrt(statistics.fmean(x * x for x in off)))
            kinds.setdefault(kind, {})[name] = replace(learned, spread=round(spread, 3))
    return replace(table, candidates=kinds)


def frame(records: Sequence[Record], width: float, source: str = "") -> Table:
    """A table without candidates: how graphs and machines are compared."""
    names = sorted(records[0].described.graph)
    values = [[r.described.graph.get(n, 0.0) for n in names] for r in records]
    scaler = StandardScaler().fit(values)
    kept = [i for i, variance in enumerate(scaler.var_) if variance > 1e-6]
    machines = []
    for record in records:
        if record.described.machine not in machines:
            machines.append(record.described.machine)
    points = scaler.transform(values)[:, kept]
    return Table(
        scales={names[i]: round(float(scaler.scale_[i]), 6) for i in kept},
        centers={names[i]: round(float(scaler.mean_[i]), 6) for i in kept},
        width=width,
        machine_scales=MACHINE_SCALES,
        machines=machines,
        points=[[round(float(x), 4) for x in row] for row in points],
        machine_of=[machines.index(r.described.machine) for r in records],
        candidates={},
        trained_on=source,
    )


def fitted(
    records: Sequence[Record], close: Any, kind: str, name: str, ridge: float
) -> Learned | None:
    """A candidate; None if there are too few records of it."""
    mine = [i for i, r in enumerate(records) if r.described.kind == kind and name in r.tried]
    right = [i for i in mine if name in records[i].gains]
    if len(right) < LEAST:
        return None
    gains = [records[i].gains[name] - _base(records[i], name) for i in right]
    mean, weights = _regression(right, gains, close, ridge)
    timed = [i for i in mine if name in records[i].rates]
    compiled: Any = (None, {})
    if len(timed) >= LEAST:
        rates = [math.log(records[i].rates[name]) for i in timed]
        compiled = _regression(timed, rates, close, ridge)
    return Learned(mean, weights, hand.SPREAD, len(right) / len(mine), *compiled)


def _base(record: Record, name: str) -> float:
    return hand.base_gain(name, record.described)


def _regression(
    places: Sequence[int], values: Sequence[float], close: Any, ridge: float
) -> tuple[float, dict[int, float]]:
    mean = statistics.fmean(values)
    model = KernelRidge(kernel="precomputed", alpha=ridge)
    model.fit(close[np.ix_(places, places)], np.asarray(values) - mean)
    weights = zip(places, model.dual_coef_, strict=True)
    return round(mean, 5), {i: round(float(w), 5) for i, w in weights}


# Judging.


Group = Callable[[Record], str]


def by_model(record: Record) -> str:
    """What is left out at once: all graphs of a model."""
    return record.model


def by_machine(record: Record) -> str:
    """All graphs of a machine."""
    return json.dumps(dict(record.described.machine))


def held_out(
    records: Sequence[Record], width: float, ridge: float, group: Group
) -> list[dict[str, float]]:
    """For each record the gains that are predicted from the others alone."""
    found: list[dict[str, float]] = [{} for _ in records]
    groups = [group(r) for r in records]
    for known, left_out in LeaveOneGroupOut().split(records, groups=groups):
        rest = [records[i] for i in known]
        table = frame(rest, width)
        close = np.stack([table.closeness(r.described.graph, r.described.machine) for r in rest])
        for i in left_out:
            described = records[i].described
            near = table.closeness(described.graph, described.machine)
            for name in records[i].tried:
                learned = fitted(rest, close, described.kind, name, ridge)
                found[i][name] = _by_hand(records[i], name)
                if learned is not None:
                    difference = learned.mean + added(near, learned.weights)
                    found[i][name] = _base(records[i], name) + difference
    return found


def best(records: Sequence[Record]) -> tuple[float, float]:
    """Width and ridge whose first choice is the fastest, in the mean of models left out.

    The error of all predictions counts a tenth as much: most are about who is not chosen anyway.
    """

    def loss(setting: tuple[float, float]) -> float:
        predicted = held_out(records, *setting, by_model)
        pairs = list(zip(records, predicted, strict=True))
        error = statistics.fmean((p[n] - g) ** 2 for r, p in pairs for n, g in r.gains.items())
        parts = [of_best(r, lambda name, p=p: p[name]) for r, p in pairs]  # type: ignore[misc]
        return 0.1 * error - statistics.fmean(math.log(part) for part in parts if part)

    return min(itertools.product(WIDTHS, RIDGES), key=loss)


def _by_hand(record: Record, name: str) -> float:
    return hand.gain_of(name, record.described)


def _pairs(
    records: Sequence[Record], predicted: Sequence[Mapping[str, float]], kind: str, name: str
) -> Iterator[tuple[Record, float]]:
    for record, found in zip(records, predicted, strict=True):
        if record.described.kind == kind and name in record.gains:
            yield record, found[name]


def judged(
    records: Sequence[Record], predicted: Sequence[Mapping[str, float]]
) -> list[dict[str, Any]]:
    """What first choices gain, compared with the best ones: learnt, by hand, always the same."""
    ways: dict[str, Callable[[int, str], float]] = {
        LEARNT: lambda i, name: predicted[i][name],
        "written by hand": lambda i, name: _by_hand(records[i], name),
    }
    for name in sorted({n for r in records for n in r.gains}):
        if all(name in r.gains for r in records):
            ways[f"always {name}"] = lambda i, other, name=name: float(other == name)  # type: ignore[misc]
    found = []
    for way, value in ways.items():
        firsts = (of_best(r, functools.partial(value, i)) for i, r in enumerate(records))
        parts = [part for part in firsts if part]
        near = sum(part >= NEAR for part in parts)
        mean = math.exp(statistics.fmean(map(math.log, parts)))
        found.append({"first_choice": way, "near": near, "graphs": len(parts), "mean": mean})
    return found


def shown(rows: Sequence[Mapping[str, Any]], left_out: str) -> Shown:
    """What was judged, for people.

    Args:
        rows: See `judged`.
        left_out: What was left out of the training at a time.
    """
    found = Shown(title=f"predicted for {left_out} that were left out")
    found.add_column("first choice")
    for column in (f"within {1 - NEAR:.0%} of the best", "of its speed (geometric mean)"):
        found.add_column(column, justify="right")
    for row in rows:
        near = f"{row['near']} of {row['graphs']}"
        found.add_row(row["first_choice"], near, f"{row['mean']:.3f}")
    return found


def published(content: Mapping[str, Any]) -> list[Shown | str]:
    """What a file of results says, for a page."""
    graphs = content["graphs"]
    rows = [row for row in content["results"] if row["left_out"] == "models"]
    said = [
        f"Learnt from {graphs['count']} graphs of {graphs['models']} models on "
        f"{graphs['machines']} processors."
    ]
    said += [
        f"Learnt without any graph of the processor: {row['near']} of {row['graphs']}, "
        f"{row['mean']:.3f}."
        for row in content["results"]
        if row["left_out"] == "machines" and row["first_choice"] == LEARNT
    ]
    return [shown(rows, "models"), *said]


def _graphs(records: Sequence[Record]) -> dict[str, int]:
    """How many graphs, models and machines there are."""
    groups = {"models": by_model, "machines": by_machine}
    return {"count": len(records)} | {n: len({of(r) for r in records}) for n, of in groups.items()}


def of_best(record: Record, value: Callable[[str], float]) -> float | None:
    """Speed of the first choice among candidates in float32, as a part of the best one's."""
    names = [n for n in record.gains if "@" not in n]
    if not names:
        return None
    first = max(names, key=value)
    return math.exp(record.gains[first] - max(record.gains[n] for n in names))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=["learn", "judge", "keep"])
    parser.add_argument("files", nargs="*", type=Path, default=sorted(RECORDED.glob("*.json")))
    parser.add_argument("--out", type=Path, default=TABLE, help="the file that is written")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save how good it is")
    settings = parser.parse_args(arguments)
    if settings.action == "keep" and settings.out == TABLE:
        parser.error("say with --out where records are kept; the table is written by learn")
    return settings


if __name__ == "__main__":
    sys.exit(main())
