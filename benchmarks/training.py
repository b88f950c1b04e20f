"""Training steps of eight models: one graph per step against eager and against split graphs.

    python benchmarks/training.py
    python benchmarks/training.py --json training.json  # the same call goes on
    python benchmarks/training.py --models resnet18 bert --rounds 10
    python benchmarks/training.py --backends autotune --tuning 300
    python benchmarks/training.py --precision bf16

Measured interleaved: eager; for each backend torch.compile, which makes a forward and a backward
graph and leaves the update to eager, and `compile_step`, which makes one graph of all of it. The
optimizer is AdamW in float32. Training takes step after step, so a sample is as many steps as take
eager a quarter of a second: the first after a pause wait for threads to wake. With `--precision
bf16` there are also steps whose forward pass computes in bfloat16: eager under autocast, and
`compile_step` with that option; their parameters stay in float32. The exit status is 1 if a way
fails, a loss differs from eager's, or a limit is not met: the better `compile_step` of inductor and
openxla is 1.5 times as fast as eager in the geometric mean, and as fast for each model.
"""

import argparse
import contextlib
import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import dynamo_backends
import harness
from dynamo_backends.aot.step.program.programs import STEPS
from dynamo_backends.bench.results_files import ResultError
from dynamo_backends.bench.suites import call
from dynamo_backends.workers import budget

MODELS = {
    "resnet18": "classic", "resnet50": "classic", "mobilenet_v2": "classic", "bert": "classic",
    "vit_s_16": "classic", "squeezenet1_1": "classic", "gpt2": "transformers", "lstm": "recurrent",
}  # fmt: skip
"""Model to suite; gpt2 has a small vocabulary, as a model of characters has."""

EAGER = "eager"
REDUCED = "@bf16"
SAMPLE_S = 0.25
IN_THE_MEAN = 1.5
FOR_EACH = 1.0
SETTLING = 4 * STEPS
"""After so many steps autotune has chosen."""


@dataclass(frozen=True)
class Column:
    """One way to train: "eager", "torch.compile" (in parts) or "compile_step" (one graph)."""

    kind: str
    backend: str = ""
    precision: str = "float32"

    def __str__(self) -> str:
        after = REDUCED if self.precision == "bf16" else ""
        return f"{self.kind} {self.backend}".strip() + after


def columns_of(backends: Sequence[str], precision: str = "float32") -> list[Column]:
    """Eager, then all that is compiled in parts, then all that is compiled as one graph.

    With "bf16" these are followed by eager and whole graphs in bfloat16.
    """
    kinds = "torch.compile", "compile_step"
    found = [Column(EAGER), *(Column(kind, backend) for kind in kinds for backend in backends)]
    if precision == "bf16":
        reduced = [Column(EAGER), *(Column("compile_step", backend) for backend in backends)]
        found += [replace(column, precision=precision) for column in reduced]
    return found


@dataclass
class Row:
    """One model, by column."""

    name: str
    milliseconds: dict[str, float] = field(default_factory=dict)  # median of a step
    speedups: dict[str, list[float]] = field(default_factory=dict)  # with the ends of its interval
    errors: dict[str, str] = field(default_factory=dict)  # why it has no time
    losses: dict[str, float] = field(default_factory=dict)  # after the warm-up: they must agree
    gflop: float = 0.0  # see `harness.Products`, of a step
    peak: float = 0.0

    def ratio(self, over: str, of: Sequence[str]) -> float | None:
        """How much faster the best of some columns is than another column."""
        best = min((self.milliseconds[c] for c in of if c in self.milliseconds), default=None)
        if best is None or over not in self.milliseconds:
            return None
        return self.milliseconds[over] / best

    @property
    def limit(self) -> float | None:
        """See `harness.Products.limit`."""
        if EAGER not in self.milliseconds:
            return None
        return harness.Products(self.gflop, self.peak).limit(self.milliseconds[EAGER])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.model_arguments(__doc__, rounds=15, models=list(MODELS))
    parser.add_argument(
        "--backends", nargs="+", metavar="NAME", default=["inductor", "openxla"], help="to compare"
    )
    parser.add_argument("--precision", default="float32", choices=["float32", "bf16"])
    parser.add_argument(
        "--tuning", type=float, default=300, metavar="S", help="seconds for autotune per column"
    )
    settings = parser.parse_args(arguments)
    console = harness.announce()
    if unknown := unknown_model(settings.models):
        return harness.refused(unknown, console)
    depend = "scale", "batch", "rounds", "backends", "precision", "tuning"
    try:
        kept = harness.Kept(settings, "training steps", depend)
    except ResultError as error:
        return harness.refused(error, console)
    kept.measure_left(settings.models, lambda name: asdict(measure(name, settings)), console)
    rows = [Row(**kept.results[name]) for name in settings.models]
    console.print(table(rows, settings.backends, settings.precision))
    for text in means(rows, settings.backends, settings.precision):
        console.print(text, highlight=False)
    return kept.status([*missed(rows, settings.backends), *mistakes(rows)], console)


def unknown_model(names: Sequence[str], models: Mapping[str, str] = MODELS) -> str:
    """What is said of a model that is not there; empty if all are."""
    unknown = [name for name in names if name not in models]
    return f"unknown model {unknown[0]!r}; there are: {', '.join(models)}" if unknown else ""


def measure(name: str, settings: argparse.Namespace) -> Row:
    """Makes every kind of step of a model, checks that losses agree, and times them."""
    case = harness.find_case(MODELS[name], name, settings.scale, settings.batch)
    row, steps = Row(name), {}
    for column in columns_of(settings.backends, settings.precision):
        budget.renew()
        try:
            step = make_step(case, column, settings.tuning)
            row.losses[str(column)] = [step().item() for _ in range(3)][-1]
            if column.backend == "autotune":
                for _ in range(SETTLING):
                    step()
            steps[str(column)] = step
        except Exception as error:
            row.errors[str(column)] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    repeat = steps_per_sample(steps[EAGER])
    timings = harness.time_candidates(
        steps, baseline=EAGER, rounds=settings.rounds, repeat=repeat, warmup=1
    )
    for way, timing in timings.items():
        row.milliseconds[way], ratio = timing.median * 1e3, timing.speedup
        row.speedups[way] = [ratio.value, ratio.low, ratio.high]
    products = harness.products_of(steps[EAGER])
    row.gflop, row.peak = products.gflop, products.peak
    torch.compiler.reset()
    gc.collect()
    return row


def steps_per_sample(step: Callable[[], Any]) -> int:
    """How many steps take at least `SAMPLE_S`."""
    start = time.perf_counter()
    step()
    return math.ceil(SAMPLE_S / (time.perf_counter() - start))


def without_dropout(case: harness.ModelCase) -> nn.Module:
    """A model to train, so that losses can be compared."""
    model = case.make().train()
    for module in model.modules():
        for name in ("p", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def loss_of(outputs: Any) -> Tensor:
    """The mean square of each output, added up."""
    leaves = [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)]
    return sum((x.square().mean() for x in leaves if x.is_floating_point()), torch.zeros(()))


def make_step(case: harness.ModelCase, column: Column, tuning_s: float = 0) -> Callable[[], Tensor]:
    """A function without arguments that trains a model of its own by one step."""
    model, batch = without_dropout(case), case.inputs()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    options = {"budget_s": tuning_s} if column.backend == "autotune" else {}
    forward: Any = model
    if column.kind == "torch.compile":
        compiler: Any = column.backend
        if column.backend != "inductor":  # which is torch's
            compiler = dynamo_backends.compiler(column.backend, **options)
        forward = torch.compile(model, backend=compiler)

    # A step that enters autocast itself, enabled or not, is compiled as it is.
    autocast = column.precision == "bf16" and column.kind == EAGER

    def step() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = loss_of(call(forward, batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if column.kind == "compile_step":
        precision: Any = column.precision
        return dynamo_backends.compile_step(
            step, model=model, optimizer=optimizer, backend=column.backend, options=options,
            precision=precision,
        )  # fmt: skip
    return step


def table(rows: Sequence[Row], backends: Sequence[str], precision: str = "float32") -> Table:
    """Medians in milliseconds, and what is gained over eager; the limit is `Row.limit`."""
    columns = [str(column) for column in columns_of(backends, precision)]
    heads = ["model", *(column.replace(" ", "\n", 1) for column in columns), "limit"]
    cells = []
    for row in rows:
        limit = "-" if row.limit is None else f"{row.limit:.2f}"
        cells.append([row.name, *(cell(row, column) for column in columns), limit])
    title = "training steps, milliseconds (medians), times as fast as eager [95%]"
    found = harness.table(heads, cells, title)
    for column in found.columns[1:]:
        column.no_wrap = True
    return found


def cell(row: Row, column: str) -> str:
    """A time, and its ratio to eager's with an interval."""
    if column not in row.milliseconds:
        return "failed"
    gain = f"\n{harness.format_ratio(harness.Ratio(*row.speedups[column]))}"
    return f"{row.milliseconds[column]:.1f}{gain * (column != EAGER)}"


def published(content: Mapping[str, Any]) -> list[Table | str]:
    """What a file of results says, for a page."""
    rows = [Row(**row) for row in content["results"].values()]
    facts = content["context"]
    wanted = facts["backends"], facts["precision"]
    return [table(rows, *wanted), *means(rows, *wanted)]


def means(rows: Sequence[Row], backends: Sequence[str], precision: str) -> list[str]:
    """What every way gains over eager, and what one graph gains over parts, in words."""
    _, *compiled = map(str, columns_of(backends, precision))
    whole = whole_steps(backends)
    questions = [(f"{column} over eager", EAGER, [column]) for column in compiled]
    for backend in backends:
        parts, one = str(Column("torch.compile", backend)), str(Column("compile_step", backend))
        questions.append((f"{one} over {parts}", parts, [one]))
    if len(whole) > 1:
        questions.append(("the best compile_step over eager", EAGER, whole))
    reduced = [column for column in compiled if column.endswith(REDUCED)]
    questions += [(f"{c} over {EAGER}{REDUCED}", EAGER + REDUCED, [c]) for c in reduced]
    if len(whole) > 1 and "inductor" in backends:
        inductor = str(Column("torch.compile", "inductor"))
        questions.append((f"the best compile_step over {inductor}", inductor, whole))
    found = []
    for text, over, of in questions:
        ratios = [r for row in rows if (r := row.ratio(over, of)) is not None]
        if ratios:
            mean = harness.geometric_mean(ratios)
            found.append(f"{text}: geometric mean {mean:.2f}, lowest {min(ratios):.2f}")
    return found


def whole_steps(backends: Sequence[str]) -> list[str]:
    """The columns of steps in float32 that are one graph."""
    return [str(Column("compile_step", backend)) for backend in backends]


def missed(rows: Sequence[Row], backends: Sequence[str]) -> list[str]:
    """Which limits the better of inductor and openxla misses."""
    if not {"inductor", "openxla"} <= set(backends):
        return []
    whole = whole_steps(["inductor", "openxla"])
    ratios = {row.name: r for row in rows if (r := row.ratio(EAGER, whole)) is not None}
    found = [
        f"{name}: the better compile_step is {ratio:.2f} times as fast as eager ({FOR_EACH:g})"
        for name, ratio in ratios.items()
        if ratio < FOR_EACH
    ]
    if ratios and (mean := harness.geometric_mean(ratios.values())) < IN_THE_MEAN:
        found.append(f"the geometric mean is {mean:.2f} ({IN_THE_MEAN:g})")
    return found


def mistakes(rows: Sequence[Row]) -> list[str]:
    """Errors, and losses that differ from eager's."""
    found = []
    for row in rows:
        found += [f"{row.name}, {column}: {error}" for column, error in row.errors.items()]
        expected = row.losses.get(EAGER, 0.0)
        for column, loss in row.losses.items():
            tolerance = 1e-2 if column.endswith(REDUCED) else 1e-3
            if abs(loss - expected) > tolerance * max(1.0, abs(expected)):
                found.append(f"{row.name}, {column}: loss {loss} instead of {expected}")
    return found


if __name__ == "__main__":
    raise SystemExit(main())
