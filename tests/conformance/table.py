"""docs/conformance.md: what sweeps of the operator database found.

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
from dynamo_backends.bench.published import conditions
from dynamo_backends.conformance import pages
from dynamo_backends.conformance.outcomes import Outcome
from dynamo_backends.interface.registry import get_backend

DOCS = Path(__file__).parents[2] / "docs"
DATA, PAGE = "operators", "conformance.md"

HEAD = """\
# Operators: PyTorch's own database through each backend

`make conformance` runs the operators of `torch.testing._internal.common_methods_invocations.op_db`
through `torch.compile(backend=...)` on the CPU, keeps what it finds in `docs/operators/`, and
writes this page.

- **native**: every sample ran whole on the backend.
- **fallback**: right, with at least one part of one sample in eager.
- **wrong**, **crash**: results that are not as accurate as eager's, or an error.

Results are compared with eager by `torch._dynamo.utils.same` against a float64 reference; integer
results must be equal. Where Dynamo itself rewrites an operator into a less exact form (`addcdiv`
with a value), what it captured is what counts.

Of *gradients*, the differentiable results and the gradients of all inputs for random incoming
gradients are compared: in float32 by the same rule, in float64 to 1e-9 of each tensor's largest
element. There, what `torch.compile` itself cannot compile with any backend is a fallback, too.

`nvfuser` ran on a double that computes with torch, in the place of nvFuser.

## Summary
"""
_COLUMNS = (
    "sweep", "dtype", "operators", "samples",
    "native", "fallback", "wrong", "crash", "native share",
)  # fmt: skip


@dataclass(frozen=True)
class Sweep:
    """What was run, in words.

    Attributes:
        name: Of the row, the section and, with "-" for what separates words, the file: the
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
    sections = []
    for path in sorted((docs / DATA).glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        sweep = Sweep(**content["sweep"])
        outcomes = [Outcome.from_dict(row) for row in content["results"]]
        summary += _summary(outcomes, sweep.name)
        said = conditions(content["environment"], content["command"], sweep.file)
        sections.append(f"### {sweep.name}\n\n{said}\n\n{_section(outcomes, sweep)}")
    tables = [rendering.table(_COLUMNS, summary, words=2), "## Operators that are not native\n"]
    return "\n".join([HEAD, *tables, *sections])


def _summary(outcomes: Sequence[Outcome], name: str) -> Iterator[tuple[str, ...]]:
    """The lines of a sweep, one for each dtype."""
    by_dtype: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_dtype[outcome.dtype].append(outcome)
    for dtype, ran in by_dtype.items():
        count = Counter(o.status for o in ran)
        crashed = sum(o.failed for o in ran) - count["wrong"]
        numbers = len(ran), sum(o.samples for o in ran), count["native"], count["fallback"]
        share = f"{native_share(ran, dtype):.1%}"
        yield name, dtype, *map(str, (*numbers, count["wrong"], crashed)), share


def _section(outcomes: Sequence[Outcome], sweep: Sweep) -> str:
    """With what a sweep was made, and its operators that are not native, with their reasons."""
    samples = f"at most {sweep.limit} of its sample inputs" if sweep.limit else "its sample inputs"
    grouped: dict[tuple[str, str], list[str]] = defaultdict(list)
    for o in outcomes:
        if o.status != "native":
            reason = next((r for r, _ in o.reasons.most_common() if "its block" not in r), o.status)
            grouped[o.name, reason].append(o.dtype)
    rows = [(op, ", ".join(dtypes), reason) for (op, reason), dtypes in sorted(grouped.items())]
    lines = pages.table(("operator", "dtypes", "why"), rows)
    return f"{sweep.operators} on {samples}, with {sweep.vendor}.\n\n{lines}\n"


def _vendor(backend: str) -> str:
    """The first of the packages behind a backend, with its version."""
    found = get_backend(backend).versions()
    (name, version), *_ = [*found.items(), ("torch", torch.__version__)]
    return f"{name} {version.partition('+')[0]}"  # without the name of its build, such as "+cpu"
