"""Autotune and every single candidate against eager: is it right, and as fast as the best of them?

    python benchmarks/autotune.py
    python benchmarks/autotune.py --json results.json --budget 1800   # the next call goes on
    python benchmarks/autotune.py --suite classic --models bert vit_s_16 --backend onnxrt
    python benchmarks/autotune.py --precision bf16
    python benchmarks/autotune.py --precision int8     # MiniLM, ResNet-50 and BERT, on real batches
    python benchmarks/autotune.py --models bert_base    # of real size: 12 layers of 768 features

Unlike `dynamo-backends bench`, this program compiles all backends of a model in one process and
times them in the same rounds: processes differ by more than what is looked for. The models are ten
classic ones and ten transformers. A figure is eager's median time over the backend's. Results are
saved after every model, and a call with the same file goes on where the last one stopped. The exit
status is 1 if autotune's result is wrong, if it is below 0.98 times eager, or more than 3% behind
the best single candidate.
"""

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import harness
from dynamo_backends._torch_private import dynamo_counters
from dynamo_backends.bench import measuring, saved_run
from dynamo_backends.bench.accuracy import as_precise
from dynamo_backends.bench.cells import EAGER, BenchConfig, Cell, Outcome, Run
from dynamo_backends.bench.results_files import ResultError
from dynamo_backends.bench.suites.case import ModelCase
from dynamo_backends.bench.summary import chosen_text
from dynamo_backends.bench.workload import DTYPES, ModelWorkload, results
from dynamo_backends.interface.compiler import compiler
from dynamo_backends.interface.errors import brief_error
from dynamo_backends.interface.registry import list_backends
from dynamo_backends.workers import budget
from harness import int8
from harness.kept import typed

AUTOTUNE = "autotune"
SINGLE = ("inductor", "inductor_freezing", "openxla", "onnxrt", "ov", "ofi")
REDUCED = ("inductor_freezing", "ov", "openxla")  # can be told to compute in bfloat16
OF_EACH_SUITE = 10
LEAST_OF_EAGER = 0.98
OF_BEST = 0.97

Outcomes = Mapping[str, Outcome]
"""Of a model, by backend."""


def main(arguments: Sequence[str] | None = None) -> int:
    settings = parse(arguments)
    console = harness.make_console()
    if settings.precision == "int8":
        return int8.run(settings, settings.backend or int8.SINGLE, console)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(settings.json or Path(folder) / "results.json")
        try:
            cases = choose(settings)
            run = saved_run.open_run(context(settings), path, resume=True)
        except (ValueError, ResultError) as error:
            return harness.refused(error, console)
        run.command = run.command or typed(sys.argv)
        console.print(f"[dim]{harness.environment_line()}, device {settings.device}[/]")
        left = measure_left(cases, run, path, settings, console)
    found = by_model(run)
    console.print(table(found, run.context))
    for model, outcomes in found.items():
        for name, outcome in outcomes.items():
            if not outcome.passed:
                text = f"{model}, {name}: {outcome.status}: {outcome.reason}"
                console.print(f"[red]{text}[/]", highlight=False)
    if left:
        console.print(
            f"{left} models are left" + "; the same command goes on" * bool(settings.json)
        )
    return 0 if all(map(passed, found.values())) else 1


def choose(settings: argparse.Namespace) -> list[ModelCase]:
    """The models to measure: of the suites, the named ones or ten of each.

    Raises:
        ValueError: A model does not exist.
    """
    suites = [settings.suite] if settings.suite else ["classic", "transformers"]
    if settings.models and not settings.suite:
        suites.append("full_size")
    cases = [harness.suite(name, settings.scale, settings.batch) for name in suites]
    if settings.models:
        return harness.find_cases([case for some in cases for case in some], settings.models)
    return [case for some in cases for case in some[:OF_EACH_SUITE]]


def context(settings: argparse.Namespace) -> dict[str, Any]:
    """What results depend on."""
    return {
        **harness.environment(),
        **asdict(how_of(settings)),
        "precision": settings.precision,
        "tuning": settings.tuning,
        "backends": list(settings.backend or SINGLE),
        "date": time.strftime("%Y-%m-%d"),
    }


def how_of(settings: argparse.Namespace) -> BenchConfig:
    """How a model is measured; none is so slow that it gets fewer rounds."""
    how = {name: getattr(settings, name) for name in ("scale", "rounds", "device")}
    return BenchConfig(settings.suite or "classic, transformers", patience_s=3600.0, **how)


def measure_left(
    cases: Sequence[ModelCase], run: Run, path: Path, settings: argparse.Namespace, console: Console
) -> int:
    """Measures the models that a run lacks, while there is time; returns how many remain."""
    names = [*run.context["backends"], AUTOTUNE]
    cells = {c.name: [Cell(c.name, name, batch=settings.batch) for name in names] for c in cases}
    run.cells = list(dict.fromkeys([*run.cells, *(cell for of in cells.values() for cell in of)]))
    due = [case for case in cases if run.left_of(cells[case.name])]
    start, longest = time.perf_counter(), 0.0
    for done, case in enumerate(due):
        begun = time.perf_counter()
        if settings.budget and done and begun - start + longest > settings.budget:
            return len(due) - done
        outcomes = measure(case, cells[case.name], settings)
        seconds = time.perf_counter() - begun
        longest = max(longest, seconds)
        run.outcomes |= {c: replace(o, seconds=seconds / len(names)) for c, o in outcomes.items()}
        saved_run.save(run, path)
        shown = ", ".join(f"{cell.backend} {text(found)}" for cell, found in outcomes.items())
        console.print(f"[dim]{case.name}: {shown}[/]", highlight=False)
    return 0


def measure(
    case: ModelCase, cells: Sequence[Cell], settings: argparse.Namespace
) -> dict[Cell, Outcome]:
    """Compiles a model with each backend, checks each, and times the right ones together."""
    how = how_of(settings)
    told: dict[Cell, dict[str, Any]] = {cell: {} for cell in cells}
    options = options_of([cell.backend for cell in cells if cell.backend != AUTOTUNE], settings)

    def backend_of(name: str) -> Any:
        return compiler(name, **options.get(name, {})) if name in list_backends() else name

    with many_backends(case):
        work = ModelWorkload(case, "inference", DTYPES["float32"], settings.device, backend_of)
        eager = results(work.eager(), 1)
        allowed = work.allowed(eager)
        if settings.precision == "bf16":
            with torch.autocast(settings.device, dtype=torch.bfloat16):
                allowed = as_precise(eager, results(work.eager(), 1))
        expected = measuring.Expected(eager, work.precise(), allowed)
        steps = {EAGER: work.eager()}
        for cell in cells:
            dynamo_counters().clear()  # they are of one backend
            try:
                step = measuring.compile_and_check(work, cell, how, told[cell].update, expected)
            except Exception as error:  # a row of the table; the others still have their turn
                told[cell] |= {"status": "fail_to_run", "reason": brief_error(error)}
                continue
            if step is not None:
                steps[cell.backend] = step
        timings = measuring.time_rounds(steps, how)
    for cell in cells:
        if cell.backend in steps:
            measuring.tell_speedup(timings[EAGER], timings[cell.backend], None, told[cell].update)
    return {cell: Outcome.from_dict({"status": "pass", **told[cell]}) for cell in cells}


@contextmanager
def many_backends(case: ModelCase) -> Iterator[None]:
    """Lets a model be compiled by many backends, and forgets them afterwards."""
    torch.compiler.reset()
    # Dynamo counts each backend of a model as one more compilation of the same code.
    with torch._dynamo.config.patch(recompile_limit=64, allow_rnn="rnn" in case.tags):
        yield
    torch.compiler.reset()
    budget.renew()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def options_of(singles: Sequence[str], settings: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Options by backend: autotune chooses among the others."""
    precision, budget_s = settings.precision, settings.tuning
    tuned = {"candidates": list(singles), "precision": precision, "budget_s": budget_s}
    reduced = REDUCED if precision == "bf16" else ()
    return {AUTOTUNE: tuned, **{name: {"precision": "bf16"} for name in singles if name in reduced}}


def by_model(run: Run) -> dict[str, dict[str, Outcome]]:
    """The outcomes of each model that was measured."""
    found: dict[str, dict[str, Outcome]] = {}
    for cell, outcome in run.outcomes.items():
        found.setdefault(cell.model, {})[cell.backend] = outcome
    return found


def ratio_of(outcome: Outcome | None) -> float | None:
    """Speedup over eager; None if the backend failed or is wrong."""
    right = outcome is not None and outcome.passed and outcome.speedup is not None
    return outcome.speedup.value if right else None  # type: ignore[union-attr]


def best_single(outcomes: Outcomes) -> tuple[str, float]:
    """The fastest single candidate and its speedup, eager among them."""
    ratios = {n: r for n, o in outcomes.items() if n != AUTOTUNE and (r := ratio_of(o)) is not None}
    return max([(EAGER, 1.0), *ratios.items()], key=lambda item: item[1])


def passed(outcomes: Outcomes) -> bool:
    """Whether autotune is right, no slower than eager, and as fast as the best."""
    ours = ratio_of(outcomes.get(AUTOTUNE))
    return ours is not None and ours >= max(LEAST_OF_EAGER, OF_BEST * best_single(outcomes)[1])


def text(outcome: Outcome | None) -> str:
    """A backend's ratio, or what became of it."""
    ratio = ratio_of(outcome)
    return f"{ratio:.2f}" if ratio is not None else outcome.status if outcome else "-"


def table(found: Mapping[str, Outcomes], facts: Mapping[str, Any], narrow: bool = True) -> Table:
    """One line per model, and the geometric means; narrow: heads may be broken in two."""
    backends = [*facts["backends"], AUTOTUNE]
    heads = [n.replace("_", "_\n", 1) if narrow else n for n in ("eager ms", *backends)]
    lines = []
    for model, of in found.items():
        best, ratio = best_single(of)
        tuned = of.get(AUTOTUNE)
        ours = ratio_of(tuned)
        eager = [statistics.median(o.eager_s) * 1e3 for o in of.values() if o.eager_s]
        lines.append([
            model if passed(of) else f"[red]{model}[/]",
            f"{eager[0]:.1f}" if eager else "-",
            *(f"[bold]{text(of.get(n))}[/]" if n == best else text(of.get(n)) for n in backends),
            chosen(tuned),
            "-" if ours is None else f"{ours / ratio:.2f}",
            f"{tuned.max_rel:.0e}" if tuned and tuned.max_rel is not None else "-",
        ])  # fmt: skip
    means = [[ratio_of(of[n]) or 1.0 for of in found.values() if n in of] for n in backends]
    cells = [f"{harness.geometric_mean(ratios):.2f}" if ratios else "-" for ratios in means]
    lines.append(["geometric mean", "", *cells, "", "", ""])
    title = f"speedup over eager, {facts['precision']}, inference"
    return harness.table(("model", *heads, "chosen", "of best", "error"), lines, title)


def chosen(outcome: Outcome | None) -> str:
    """Whom autotune chose, and what it leaves to eager."""
    if outcome is None:
        return ""
    left = f"{outcome.ops_fallback} operators in eager" if outcome.ops_fallback else ""
    return "; ".join(filter(None, [chosen_text(outcome.chosen), left, outcome.note]))


def published(content: Mapping[str, Any]) -> list[Table | str]:
    """What a file of results says, for a page."""
    if content["kind"] == "int8":
        return int8.published(content)
    run = saved_run.run_of(content)
    return [table(by_model(run), run.context, narrow=False)]


def parse(arguments: Sequence[str] | None) -> Any:
    """Parses the command line."""
    parser = harness.model_arguments(__doc__, rounds=20)
    parser.add_argument("--suite", choices=list(harness.SUITES), help="only this suite")
    singles = f"a single candidate; repeatable; default: {', '.join(SINGLE)}"
    parser.add_argument("--backend", action="append", metavar="NAME", help=singles)
    parser.add_argument("--precision", default="float32", choices=["float32", "bf16", "int8"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    seconds: dict[str, Any] = {"type": float, "metavar": "S"}
    parser.add_argument("--tuning", default=600.0, help="for autotune and one model", **seconds)
    parser.add_argument("--budget", help="begin no model that may end later", **seconds)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
