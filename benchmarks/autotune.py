"""Autotune and every single candidate against eager: is it right, and as fast as the best of them?

    python benchmarks/autotune.py
    python benchmarks/autotune.py --suite classic --models bert vit_s_16 --backend onnxrt

All are timed interleaved, on ten classic models and ten transformers. A figure is eager's median
time over the backend's. The exit status is 1 if autotune's result is wrong, if it is below 0.98
times eager, or more than 3% behind the best single candidate.
"""

import argparse
import gc
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dynamo_backends import bench

AUTOTUNE = "autotune"
SINGLE = ("inductor", "inductor_freezing", "openxla", "onnxrt", "ov", "ofi")
TRANSFORMERS = 10
LEAST_OF_EAGER = 0.98
LEAST_OF_BEST = 0.97


@dataclass(frozen=True)
class Line:
    """One model.

    Attributes:
        model: Its name.
        results: By backend.
    """

    model: str
    results: Mapping[str, bench.Result]

    def ratio(self, backend: str) -> float | None:
        """Speedup over eager; None if the backend failed or is wrong."""
        result = self.results[backend]
        if result.timing is None or not result.passed:
            return None
        return result.timing.speedup.value

    @property
    def best(self) -> tuple[float, str]:
        """The best single candidate, eager among them."""
        singles = [(self.ratio(name) or 0.0, name) for name in self.results if name != AUTOTUNE]
        return max([(1.0, "eager"), *singles])

    @property
    def chosen(self) -> str:
        """What autotune chose for the model's graphs."""
        compiled = self.results[AUTOTUNE].compiled
        names = dict.fromkeys(r.chosen for r in compiled.reports) if compiled else ()
        return ", ".join(names)

    @property
    def passed(self) -> bool:
        """Whether autotune is right, no slower than eager, and as fast as the best."""
        ours = self.ratio(AUTOTUNE)
        return ours is not None and ours >= max(LEAST_OF_EAGER, LEAST_OF_BEST * self.best[0])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    settings = parse(arguments)
    console = bench.make_console()
    try:
        cases = choose(settings)
    except ValueError as error:
        console.print(f"[red]{error}[/]")
        return 2
    backends = [*(settings.backend or SINGLE), AUTOTUNE]
    console.print(f"[dim]{bench.environment_line()}, device {settings.device}[/]")
    lines = measure(cases, backends, settings, console)
    console.print(table(lines, backends, settings))
    for line in lines:
        for name, result in line.results.items():
            if result.error:
                console.print(f"[red]{line.model} on {name}:[/] {result.error}", highlight=False)
    if settings.json:
        records = [bench.as_record(r) for line in lines for r in line.results.values()]
        bench.save_json(settings.json, "autotune", records, settings=vars(settings))
    return 0 if all(line.passed for line in lines) else 1


def choose(settings: argparse.Namespace) -> list[bench.ModelCase]:
    """The models to measure: of the suites, the named ones or as many as are wanted of each."""
    suites = [settings.suite] if settings.suite else ["classic", "transformers"]
    cases = [bench.suite(name, settings.scale, settings.batch) for name in suites]
    everything = list(itertools.chain(*cases))
    if settings.models:
        return bench.find_cases(everything, settings.models)
    return list(itertools.chain(*(some[:TRANSFORMERS] for some in cases)))


def measure(
    cases: Sequence[bench.ModelCase],
    backends: Sequence[str],
    settings: argparse.Namespace,
    console: Console,
) -> list[Line]:
    """Measures each model; drops each before the next is made."""
    singles = [name for name in backends if name != AUTOTUNE]
    tuning: dict[str, Any] = {"candidates": singles, "precision": settings.precision}
    tuning |= {"budget_s": settings.budget}
    reduced = {name: {"precision": "bf16"} for name in singles if name in ("ov", "openxla")}
    options = {AUTOTUNE: tuning, **(reduced if settings.precision == "bf16" else {})}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    lines: list[Line] = []
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=len(cases) * (len(backends) + settings.rounds))
        for case in cases:

            def step(what: str, name: str = case.name) -> None:
                progress.update(task, description=f"{name}: {what}", advance=1)

            with torch.no_grad():
                results = bench.measure_case(
                    case,
                    backends,
                    settings.device,
                    rounds=settings.rounds,
                    options=options,
                    synchronize=torch.cuda.synchronize if settings.device == "cuda" else None,
                    on_step=step,
                )
            lines.append(Line(case.name, {r.backend: r.without_model() for r in results}))
            del results
            torch.compiler.reset()
            gc.collect()
    return lines


def table(lines: Sequence[Line], backends: Sequence[str], settings: argparse.Namespace) -> Table:
    """One line per model, and the geometric means."""
    title = f"speedup over eager, {settings.precision}, batch {settings.batch}, inference"
    found = Table(title=title, box=SIMPLE_HEAD, pad_edge=False)
    found.add_column("model")
    for name in ("eager ms", *backends):
        found.add_column(name.replace("_", "_\n", 1), justify="right", no_wrap=True)
    found.add_column("chosen")
    found.add_column("of best", justify="right")
    for line in lines:
        base = next((r.eager for r in line.results.values() if r.eager), None)
        ours, best = line.ratio(AUTOTUNE), line.best
        found.add_row(
            line.model,
            f"{base.median * 1e3:.1f}" if base else "-",
            *(_cell(line.ratio(name), name == best[1]) for name in backends),
            line.chosen,
            "-" if ours is None else f"{ours / best[0]:.2f}",
            style=None if line.passed else "red",
        )
    means = [_cell(_mean(lines, name), False) for name in backends]
    found.add_section()
    found.add_row("geometric mean", "", *means, "", "")
    return found


def _cell(ratio: float | None, best: bool) -> str:
    text = "wrong" if ratio is None else f"{ratio:.2f}"
    return f"[bold]{text}[/]" if best else text


def _mean(lines: Sequence[Line], backend: str) -> float | None:
    """Over all models; one on which the backend fails counts as eager."""
    return bench.geometric_mean(line.ratio(backend) or 1.0 for line in lines) if lines else None


def parse(arguments: Sequence[str] | None) -> Any:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", metavar="NAME", help="only these models")
    parser.add_argument("--suite", choices=list(bench.SUITES), help="only this suite")
    parser.add_argument("--scale", default="bench", choices=["bench", "test"], help="model sizes")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20, help="samples of each")
    parser.add_argument(
        "--backend",
        action="append",
        metavar="NAME",
        help=f"a single candidate; repeatable; default: {', '.join(SINGLE)}",
    )
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds for all tuning")
    parser.add_argument("--precision", default="float32", choices=["float32", "bf16"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--json", metavar="FILE", help="save the results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
