"""Writes docs/checked-backends.md from the runs of `dynamo-backends conformance` in docs/checked/.

python tools/checked.py [FILE.json ...]

Files are copied to docs/checked/ first; each replaces an earlier run of its backend. Of a run of
random graphs alone (`--rewrites N`) docs/checked/rewrites/ gets the counts, and what is not right.
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamo_backends.conformance.outcomes import FAILURES, GROUPS, STATUSES, UNTRIED, Group, Outcome
from dynamo_backends.conformance.pages import reasons_table, table

ROOT = Path(__file__).parents[1]
DATA, PAGE = ROOT / "docs/checked", ROOT / "docs/checked-backends.md"
RANDOM_GRAPHS = DATA / "rewrites"
RIGHT = ("native", "fallback")

HEAD = """\
# Checked backends

Results of [`dynamo-backends conformance`](checking-backends.md) for some backends: first the number
of checks of each group that failed, of those that could be run, then how the checks ended
([what the words mean](checking-backends.md#what-counts-as-right)). Endings that no check had are
left out; random graphs are counted [below](#random-graphs). The links lead to the results, with the
versions of all packages.
"""

DIFFERENT_HEAD = """\
## Where results differ

The ten most common reasons of what failed, was declared or had other random numbers.

`openvino` is OpenVINO's own backend; this package's is `ov`. On processors with AVX512-BF16, such
as that of its run, OpenVINO computes float32 in bfloat16 unless the option
`INFERENCE_PRECISION_HINT` is `f32`, which is less accurate than eager: differences of less than 0.1
may come from that. [differences.md](differences.md) explains the declared ones.
"""

EAGER_HEAD = """\
## Why parts ran in eager

The ten most common main reasons, counted once for each check that is right, but did not run wholly
on the backend. Only this package's backends say what they leave to eager.
"""

RANDOM_GRAPHS_HEAD = """\
## Random graphs

Results of `dynamo-backends conformance BACKEND --rewrites N --seed 0`
([what it does](checking-backends.md#random-graphs)). A graph counts as declared if
[differences.md](differences.md) has the difference for the backend, and as torch's own if one of
torch's backends is wrong at the same elements. The last column is the share of all others that ran
wholly on the backend.
"""

TAIL = """\
## Look up a check, and measure again

In a checkout of the repository, this prints the results of single checks with all reasons:

    python tools/look_up.py "views*" --backend openvino
    python tools/look_up.py "*" --backend ov --status fallback declared

A run of a backend replaces its results here with:

    dynamo-backends conformance ov --groups semantics weights operators --share 24 --output reports
    python tools/checked.py reports/ov.json

`docs/checked/` has a JSON file for each backend: `commands`; `date`; `context`, with the machine
and all versions; `not_run`, checks without a result; and `results`, a row per check:

- `group`, `name`, `dtype`, `samples` (how many were run), `seconds`.
- `status`: a word of [this list](checking-backends.md#what-counts-as-right).
- `reasons`: each reason with how often it occurred; of what runs in eager, or of a failure.
- `declared`: names of known differences; `example`: a program that shows the failure of a graph.

Keys without a value are left out. In `docs/checked/rewrites/`, which has the random graphs,
`counts` says how many ended with which status, and `results` has those that are not right.
"""


def text(runs: Sequence[dict[str, Any]], graphs: Sequence[dict[str, Any]] = ()) -> str:
    """The page of some runs, and of some runs of random graphs."""
    outcomes = [
        (name(run), Outcome.from_dict(row)) for run in (*runs, *graphs) for row in run["results"]
    ]
    groups = [
        group
        for group in GROUPS
        if (graphs and group == "rewrites") or any(o.group == group for _, o in outcomes)
    ]
    ends = {result["status"] for run in runs for result in run["results"]}
    statuses = [status for status in STATUSES if status in ends]
    counts = {name(run): _random_graphs(run) for run in graphs}
    rows = []
    for run in runs:
        link = f"[{name(run)}](checked/{name(run)}.json)"
        count = Counter(result["status"] for result in run["results"])
        failed = _failed(run, groups, counts.get(name(run), ""))
        rows.append((link, *failed, *(count[status] for status in statuses), run["date"]))
    different = [(n, o) for n, o in outcomes if o.status in {*FAILURES, "declared", "random"}]
    eager = [(n, o) for n, o in outcomes if o.status == "fallback"]
    heads = ("backend", "versions", "seeds", *_NOT_RIGHT, "wholly on the backend")
    parts = [
        HEAD,
        table(("backend", *groups, *statuses, "date"), rows) + "\n",
        DIFFERENT_HEAD,
        reasons_table("checks", different),
        EAGER_HEAD,
        reasons_table("checks", eager),
    ]
    if graphs:
        parts += [RANDOM_GRAPHS_HEAD, table(heads, map(_row, graphs)) + "\n"]
    return "\n".join([*parts, TAIL])


_NOT_RIGHT = {
    "wrong": ("wrong",),
    "errors": ("raises",),
    "crashes": ("crash", "timeout"),
    "declared": ("declared",),
    "torch's own": ("torch",),
}


def _row(run: dict[str, Any]) -> list[Any]:
    count: Mapping[str, int] = run["counts"]
    packages = run["context"]["packages"].items()
    versions = ", ".join(f"{name} {version.partition('+')[0]}" for name, version in packages)
    tried = sum(n for status, n in count.items() if status not in UNTRIED)
    return [
        name(run),
        versions,
        sum(count.values()),
        *(sum(count.get(status, 0) for status in group) for group in _NOT_RIGHT.values()),
        f"{count.get('native', 0) / tried:.1%}",
    ]


def _random_graphs(run: dict[str, Any]) -> str:
    count = {s: n for s, n in run["counts"].items() if s not in UNTRIED}
    return f"{sum(count.get(s, 0) for s in FAILURES)}/{sum(count.values())}"


def summarized(run: dict[str, Any]) -> dict[str, Any]:
    """A run of random graphs with the number of those that are right."""
    counts = Counter(result["status"] for result in run["results"])
    results = [result for result in run["results"] if result["status"] not in RIGHT]
    return {**run, "counts": dict(sorted(counts.items())), "results": results}


def name(run: dict[str, Any]) -> str:
    """The backend of a run."""
    return str(run["context"]["backend"])


def _failed(run: dict[str, Any], groups: Sequence[Group], random_graphs: str) -> list[str]:
    outcomes = [Outcome.from_dict(given) for given in run["results"]]
    cells = []
    for group in groups:
        tried = [o for o in outcomes if o.group == group and o.status not in UNTRIED]
        failed = Counter(o.failed for o in tried)[True]
        cells.append(f"{failed}/{len(tried)}" if tried else "not run")
    if random_graphs:
        cells[groups.index("rewrites")] = random_graphs
    return cells


def runs_in(folder: Path) -> list[dict[str, Any]]:
    """The runs of a folder."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def main(files: Sequence[str]) -> None:
    """Copies runs and writes the page."""
    RANDOM_GRAPHS.mkdir(parents=True, exist_ok=True)
    for file in files:
        run = json.loads(Path(file).read_text(encoding="utf-8"))
        if {result["group"] for result in run["results"]} == {"rewrites"}:
            run, folder = summarized(run), RANDOM_GRAPHS
        else:
            folder = DATA
        (folder / Path(file).name).write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(text(runs_in(DATA), runs_in(RANDOM_GRAPHS)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
