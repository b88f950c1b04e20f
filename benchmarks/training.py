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
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor
from torch.utils import _pytree as pytree

import dynamo_backends
import harness
from dynamo_backends.aot.step.program.programs import STEPS
from dynamo_backends.bench.results_files import ResultError
from dynamo_backends.bench.suites import call
from dynamo_backends.workers import budget
from harness.kept import Kept

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
"""So many steps later autotune has chosen: two ways of steps, a functional program and eager took
theirs."""


@dataclass(frozen=True)
class Column:
    """One way to train.

    Attributes:
        kind: "eager", "torch.compile" (in parts) or "compile_step" (one graph).
        backend: What compiles, or "".
        precision: Of the forward pass.
    """

    kind: str
    backend: str = ""
    precision: str = "float32"

    def __str__(self) -> str:
        after = REDUCED if self.precision == "bf16" else ""
        return f"{self.kind} {self.backend}".strip() + after


def columns_of(backends: Sequence[str], precision: str = "float32") -> list[Column]:
    """Eager, then all that is compiled in parts, then all that is compiled as one graph.

    Args:
        backends: What compiles.
        precision: "bf16": and then eager and whole graphs in bfloat16.
    """
    kinds = "torch.compile", "compile_step"
    found = [Column(EAGER), *(Column(kind, backend) for kind in kinds for backend in backends)]
    if precision == "bf16":
        reduced = [Column(EAGER), *(Column("compile_step", backend) for backend in backends)]
        found += [replace(column, precision=precision) for column in reduced]
    return found


@dataclass
class Row:
    """One model.

    Attributes:
        name: The model.
        milliseconds: Median of a step, by column.
        speedups: Over eager, with the ends of its 95% interval, by column.
        errors: Why a column has no time.
        losses: After the warm-up, by column: they must agree.
        gflop: See `harness.Products`; of a step.
        peak: See there.
    """

    name: str
    milliseconds: dict[str, float] = field(default_factory=dict)
    speedups: dict[str, list[float]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    gflop: float = 0.0
    peak: float = 0.0

    @property
    def line(self) -> str:
        """What is shown as soon as the model has been measured."""
        times = (f"{column} {ms:.1f}" for column, ms in self.milliseconds.items())
        return f"[dim]{self.name}: {', '.join(times)} ms[/]"

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
    """Runs the benchmark; returns 1 if a column failed or a loss differs."""
    settings = parse(arguments)
    console = harness.make_console()
    if not are_known(settings.models, console):
        return 2
    console.print(f"[dim]{harness.environment_line()}[/]")
    try:
        kept = Kept(settings.json, "training steps", context(settings))
    except ResultError as error:
        console.print(f"[red]{error}[/]", highlight=False)
        return 2
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        left = [name for name in settings.models if name not in kept.results]
        parts = len(columns_of(settings.backends, settings.precision)) + settings.rounds
        task = progress.add_task("", total=len(left) * parts)
        for name in left:

            def note(what: str, name: str = name) -> None:
                progress.update(task, description=f"{name}: {what}", advance=1)

            row = measure(name, settings, note)
            kept.add(name, asdict(row))
            progress.console.print(row.line, highlight=False)
            torch.compiler.reset()
            gc.collect()
    rows = [Row(**kept.results[name]) for name in settings.models]
    console.print(table(rows, settings.backends, settings.precision))
    for text in means(rows, settings.backends, settings.precision):
        console.print(text, highlight=False)
    missed = print_missed(rows, settings.backends, console)
    return 1 if print_mistakes(rows, console) or missed else 0


def context(settings: argparse.Namespace) -> dict[str, Any]:
    """What results depend on."""
    names = "scale", "batch", "rounds", "backends", "precision", "tuning"
    return {**harness.environment(), **{name: getattr(settings, name) for name in names}}


def are_known(names: Sequence[str], console: Console) -> bool:
    """Whether all models are there; else says which there are."""
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        console.print(f"[red]unknown model {unknown[0]!r}; there are: {', '.join(MODELS)}[/]")
    return not unknown


def measure(name: str, settings: argparse.Namespace, note: Callable[[str], None]) -> Row:
    """Makes every kind of step of a model, checks that losses agree, and times them."""
    case = harness.find_case(MODELS[name], name, settings.scale, settings.batch)
    row, steps = Row(name), {}
    for column in columns_of(settings.backends, settings.precision):
        note(f"making {column}")
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
    timings = harness.time_candidates(
        steps,
        baseline=EAGER,
        rounds=settings.rounds,
        repeat=steps_per_sample(steps[EAGER]),
        warmup=1,
        on_round=lambda: note("measuring"),
    )
    for name, timing in timings.items():
        row.milliseconds[name] = timing.median * 1e3
        ratio = timing.speedup
        row.speedups[name] = [ratio.value, ratio.low, ratio.high]
    products = harness.products_of(steps[EAGER])
    row.gflop, row.peak = products.gflop, products.peak
    return row


def steps_per_sample(step: Callable[[], Any]) -> int:
    """How many steps take at least `SAMPLE_S`."""
    start = time.perf_counter()
    step()
    return math.ceil(SAMPLE_S / (time.perf_counter() - start))


def make_step(case: harness.ModelCase, column: Column, tuning_s: float = 0) -> Callable[[], Tensor]:
    """A function without arguments that trains a model of its own by one step."""
    model, batch = case.make().train(), case.inputs()
    for module in model.modules():
        for name in ("p", "dropout_prob"):  # so that losses can be compared
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def loss_of(forward: Callable[..., Any]) -> Tensor:
        leaves = [x for x in pytree.tree_leaves(call(forward, batch)) if isinstance(x, Tensor)]
        return sum((x.square().mean() for x in leaves if x.is_floating_point()), torch.zeros(()))

    options = {"budget_s": tuning_s} if column.backend == "autotune" else {}
    forward: Any = model
    if column.kind == "torch.compile":
        compiler: Any = column.backend
        if column.backend != "inductor":  # which is torch's
            compiler = dynamo_backends.compiler(column.backend, **options)
        forward = torch.compile(model, backend=compiler)

    is_reduced = column.precision == "bf16"

    # A step that enters autocast itself, enabled or not, is compiled as it is.
    autocast = is_reduced and column.kind == EAGER

    def step() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = loss_of(forward)
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
    found = Table(title="training steps, milliseconds (medians), times as fast as eager [95%]")
    found.add_column("model")
    for column in (*columns, "limit"):
        found.add_column(column.replace(" ", "\n", 1), justify="right", no_wrap=True)
    for row in rows:
        limit = "-" if row.limit is None else f"{row.limit:.2f}"
        found.add_row(row.name, *(cell(row, column) for column in columns), limit)
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


def print_missed(rows: Sequence[Row], backends: Sequence[str], console: Console) -> bool:
    """Prints which limits the better of inductor and openxla misses; whether there are any."""
    if not {"inductor", "openxla"} <= set(backends):
        return False
    whole = whole_steps(["inductor", "openxla"])
    ratios = {row.name: r for row in rows if (r := row.ratio(EAGER, whole)) is not None}
    missed = [
        f"{name}: the better compile_step is {ratio:.2f} times as fast as eager ({FOR_EACH:g})"
        for name, ratio in ratios.items()
        if ratio < FOR_EACH
    ]
    if ratios and (mean := harness.geometric_mean(ratios.values())) < IN_THE_MEAN:
        missed.append(f"the geometric mean is {mean:.2f} ({IN_THE_MEAN:g})")
    for text in missed:
        console.print(f"[red]{text}[/]", highlight=False)
    return bool(missed)


def print_mistakes(rows: Sequence[Row], console: Console) -> bool:
    """Prints errors and losses that differ from eager's; returns whether there were any."""
    wrong = False
    for row in rows:
        for column, error in row.errors.items():
            wrong = True
            console.print(f"[red]{row.name}, {column}:[/] {error}", markup=True)
        expected = row.losses.get(EAGER, 0.0)
        for column, loss in row.losses.items():
            tolerance = 1e-2 if column.endswith(REDUCED) else 1e-3
            if abs(loss - expected) > tolerance * max(1.0, abs(expected)):
                wrong = True
                console.print(f"[red]{row.name}, {column}: loss {loss} instead of {expected}[/]")
    return wrong


def parse(arguments: Sequence[str] | None) -> Any:
    """Parses the command line."""
    parser = harness.model_arguments(__doc__, rounds=15, models=list(MODELS))
    parser.add_argument(
        "--backends", nargs="+", metavar="NAME", default=["inductor", "openxla"], help="to compare"
    )
    parser.add_argument("--precision", default="float32", choices=["float32", "bf16"])
    parser.add_argument(
        "--tuning", type=float, default=300, metavar="S", help="seconds for autotune per column"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
