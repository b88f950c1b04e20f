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

from dynamo_backends.conformance.outcomes import FAILURES, GROUPS, UNTRIED, Outcome
from dynamo_backends.conformance.pages import page, table

ROOT = Path(__file__).parents[1]
DATA, PAGE = ROOT / "docs/checked", ROOT / "docs/checked-backends.md"
RANDOM_GRAPHS = DATA / "rewrites"
RIGHT = ("native", "fallback")

HEAD = """\
# Checked backends

Results of [`dynamo-backends conformance`](checking-backends.md) for some backends: the number of
checks that failed, of those that could be run. `python tools/checked.py` writes this page from the
runs in `docs/checked/`.

`openvino` is OpenVINO's own backend; this package's is `ov`. On processors with AVX512-BF16, such
as that of its run, OpenVINO computes float32 in bfloat16 unless the option
`INFERENCE_PRECISION_HINT` is `f32`, which is less accurate than eager: differences of less than 0.1
may come from that.
"""

RANDOM_GRAPHS_HEAD = """\
## Random graphs

Results of `dynamo-backends conformance BACKEND --rewrites N --seed 0`
([what it does](checking-backends.md#random-graphs)). A graph counts as declared if
[differences.md](differences.md) has the difference for the backend, and as torch's own if one of
torch's backends is wrong at the same elements. The last column is the share of all others that ran
wholly on the backend.
"""


def text(runs: Sequence[dict[str, Any]], graphs: Sequence[dict[str, Any]] = ()) -> str:
    """The page of some runs, and of some runs of random graphs."""
    counts = {name(run): _random_graphs(run) for run in graphs}
    rows = [
        (f"[{name(run)}](#conformance-of-{name(run)})", *_counts(run, counts.get(name(run))))
        for run in runs
    ]
    heads = ("backend", "versions", "seeds", *_NOT_RIGHT, "wholly on the backend")
    table_of_graphs = table(heads, (_row(run) for run in graphs))
    return "\n".join(
        [
            HEAD,
            table(("backend", *GROUPS), rows) + "\n",
            *([RANDOM_GRAPHS_HEAD, table_of_graphs + "\n"] if graphs else []),
            *(page(run, 2) for run in runs),
        ]
    )


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
    return f"{sum(count.get(s, 0) for s in FAILURES)} of {sum(count.values())}"


def summarized(run: dict[str, Any]) -> dict[str, Any]:
    """A run of random graphs with the number of those that are right."""
    counts = Counter(result["status"] for result in run["results"])
    results = [result for result in run["results"] if result["status"] not in RIGHT]
    return {**run, "counts": dict(sorted(counts.items())), "results": results}


def name(run: dict[str, Any]) -> str:
    """The backend of a run."""
    return str(run["context"]["backend"])


def _counts(run: dict[str, Any], random_graphs: str | None) -> list[str]:
    outcomes = [Outcome.from_dict(given) for given in run["results"]]
    cells = []
    for group in GROUPS:
        tried = [o for o in outcomes if o.group == group and o.status not in UNTRIED]
        failed = Counter(o.failed for o in tried)[True]
        cells.append(f"{failed} of {len(tried)}" if tried else "not run")
    if random_graphs:
        cells[GROUPS.index("rewrites")] = random_graphs
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
