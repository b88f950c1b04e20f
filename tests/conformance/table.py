"""docs/conformance.md: a summary of what sweeps of the operator database found.

Each sweep is kept as docs/operators/NAME.json, of which the page is made.
"""

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from dynamo_backends.bench import rendering
from dynamo_backends.bench.environment import environment
from dynamo_backends.conformance import pages
from dynamo_backends.conformance.outcomes import Outcome
from dynamo_backends.interface.registry import get_backend

DOCS = Path(__file__).parents[2] / "docs"
DATA, PAGE = "operators", "conformance.md"

HEAD = """\
# Operators: PyTorch's own database through each backend

How many operators of `torch.testing._internal.common_methods_invocations.op_db` run on each
backend, called through `torch.compile(backend=...)` on the CPU.

- **native**: every sample ran whole on the backend, as one operator or decomposed into others.
- **fallback**: right, with at least one part of one sample left to eager.
- **wrong**, **crash**: results that are not as accurate as eager's, or an error.

`openxla, gradients` are the gradients of all inputs, for random incoming gradients. What
`torch.compile` cannot compile with any backend is a fallback there.

## Summary
"""

LOOK_UP = """\
## Look up an operator

In a checkout of the repository, `tools/look_up.py` prints the recorded results: a line for each
backend and status, with all reasons. Patterns match names of the database:

    python tools/look_up.py linalg.svd
    python tools/look_up.py "*" --backend ltc --status fallback

With an installed package, this command runs the operator with the versions that you have:

    dynamo-backends conformance openxla --groups operators --only linalg.svd
"""

REASONS_HEAD = """\
## Why operators run in eager

The ten most common main reasons in float32, counted once for each operator and sweep. What Dynamo
does not capture whole runs in parts with every backend of `torch.compile`.
"""

DIFFERENT_HEAD = """\
## Where results differ

Results are compared with eager by `torch._dynamo.utils.same` against a float64 reference; integer
results must be equal. Results and gradients in float64 must be within 1e-9 of each tensor's largest
element.
Where Dynamo itself rewrites an operator into a less exact form (`addcdiv` with a value), what it
captured is the reference. The samples hold no extreme values. [differences.md](differences.md)
lists the known differences for those, with their causes.
"""

SWEEPS_HEAD = """\
## Files and commands

`make conformance ARGS="..."` runs a sweep and rewrites its file in `docs/operators/` and this page.
Without arguments it runs all sweeps, which takes hours. `--resume` continues an interrupted one.
"""

FILES = """\
Each file is JSON: `command`; `environment`, with the versions of all packages; `sweep`, what was
run; and `results`, a row per operator and dtype:

- `name`, `dtype`, `group` (`operators` or `gradients`), `samples` (how many were run), `seconds`.
- `status`: `native`, `fallback`, `wrong`, `raises`, `crash` or `timeout`.
- `reasons`: each reason with how often it occurred; of what runs in eager, or of a failure.

Keys without a value are left out.
"""
_COLUMNS = (
    "sweep", "dtype", "operators", "native", "fallback", "wrong", "crash", "native share",
)  # fmt: skip


@dataclass(frozen=True)
class Sweep:
    """What was run, in words.

    Attributes:
        name: Of the row and, with "-" for what separates words, the file: the
            backend's, or what of it was swept.
        backend: Which one ran the operators.
        arguments: Those of `make conformance`.
        vendor: What runs it, where that is not the first of the packages behind it.
        limit: How many samples of each were run at most.
        operators: Which were run.
    """

    name: str
    backend: str
    arguments: str
    vendor: str = ""
    limit: int | None = None
    operators: str = "Every operator"

    @property
    def file(self) -> str:
        """The file of its results, in docs/."""
        return f"{DATA}/{self.name.replace(', ', '-')}.json"


def asked(config: pytest.Config, chosen: str) -> str:
    """The arguments of `make conformance` that decide what a sweep finds."""
    limit, dtypes = config.getoption("--samples"), config.getoption("--dtype") or ()
    samples = [f"--samples {limit}"] if limit else []
    return " ".join([f"-k {chosen}", *samples, *(f"--dtype {dtype}" for dtype in dtypes)])


def native_share(outcomes: Sequence[Outcome], dtype: str) -> float:
    """The share of a dtype's operators that ran without any fallback."""
    ran = [o for o in outcomes if o.dtype == dtype and o.samples]
    return sum(o.status == "native" for o in ran) / len(ran)


def write(outcomes: Sequence[Outcome], sweep: Sweep, docs: Path = DOCS) -> None:
    """Keeps a sweep in the place of an earlier one, and writes the page."""
    facts = {"date": time.strftime("%Y-%m-%d"), **environment()}
    del facts["torch_threads"]  # of this process, which runs none of them
    about: dict[str, Any] = {
        "kind": "operator database",
        "command": f'make conformance ARGS="{sweep.arguments}"',
        "environment": facts,
        "sweep": asdict(sweep) | {"vendor": sweep.vendor or _vendor(sweep.backend)},
    }
    path = docs / sweep.file
    path.parent.mkdir(exist_ok=True)
    ran = (o for o in outcomes if o.samples)
    rows = (json.dumps(o.to_dict() | {"seconds": round(o.seconds, 1)}) for o in ran)
    head = json.dumps(about, indent=1).removesuffix("\n}")
    path.write_text(f'{head},\n "results": [\n' + ",\n".join(rows) + "\n ]\n}\n", encoding="utf-8")
    (docs / PAGE).write_text(page(docs), encoding="utf-8")


def page(docs: Path = DOCS) -> str:
    """The page of the sweeps that are kept."""
    summary: list[tuple[str, ...]] = []
    made: list[tuple[str, ...]] = []
    machines: list[str] = []
    chosen: list[str] = []
    outcomes: list[tuple[str, Outcome]] = []
    for path in sorted((docs / DATA).glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        sweep = Sweep(**content["sweep"])
        ran = [Outcome.from_dict(row) for row in content["results"]]
        outcomes += [(sweep.name, outcome) for outcome in ran]
        summary += _summary(ran, sweep.name)
        facts = content["environment"]
        link, arguments = f"[{sweep.name}]({sweep.file})", f"`{sweep.arguments}`"
        made.append((link, sweep.vendor, arguments, facts["date"]))
        machines.append(f"{facts['processor']}, torch {facts['versions']['torch']}")
        if sweep.operators != Sweep.operators:
            chosen.append(f"- {sweep.name}: {sweep.operators[0].lower()}{sweep.operators[1:]}.")
    eager = ((n, o) for n, o in outcomes if o.status == "fallback" and o.dtype == "float32")
    failed = [(n, o) for n, o in outcomes if o.failed]
    rows = [(n, str(o.check), o.status, pages.main_reason(o)) for n, o in failed[:10]]
    return "\n".join(
        [
            HEAD,
            rendering.table(_COLUMNS, summary, words=2),
            LOOK_UP,
            REASONS_HEAD,
            pages.reasons_table("operators", eager),
            DIFFERENT_HEAD,
            f"Wrong results and errors: {len(failed)} of {len(outcomes)}.\n",
            *([pages.table(("sweep", "check", "status", "why"), rows) + "\n"] if rows else []),
            SWEEPS_HEAD,
            pages.table(("results", "run by", "ARGS", "date"), made),
            f"\nMeasured on {'; '.join(dict.fromkeys(machines))}.\n",
            *(["These sweeps run a part of the operators:\n", *chosen, ""] if chosen else []),
            FILES,
        ]
    )


def _summary(outcomes: Sequence[Outcome], name: str) -> Iterator[tuple[str, ...]]:
    """The lines of a sweep, one for each dtype."""
    by_dtype: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_dtype[outcome.dtype].append(outcome)
    for dtype, ran in by_dtype.items():
        count = Counter(o.status for o in ran)
        crashed = sum(o.failed for o in ran) - count["wrong"]
        numbers = len(ran), count["native"], count["fallback"]
        share = f"{native_share(ran, dtype):.1%}"
        yield name, dtype, *map(str, (*numbers, count["wrong"], crashed)), share


def _vendor(backend: str) -> str:
    """The first of the packages behind a backend, with its version."""
    found = get_backend(backend).versions()
    (name, version), *_ = [*found.items(), ("torch", torch.__version__)]
    return f"{name} {version.partition('+')[0]}"  # without the name of its build, such as "+cpu"
