"""How long compiling a model takes, against torch's own compiler; nothing is cached.

    python benchmarks/compile_time.py
    python benchmarks/compile_time.py --share
    python benchmarks/compile_time.py --table --json table.json # the same call goes on
    python benchmarks/compile_time.py --steps

Each compilation is the first in a process of its own with empty cache folders. Counted is the first
call (capture, compilation, one run) less one further call.

With --share: for every model of the classic suite, which part of the first call the comparison with
eager takes (the option `verify`), and by how much the process grows in that call with it and
without.

With --table: twelve models by Inductor and this package's backends, each in a process with empty
caches, in a second one, and in one that finds verdicts and choices but no graph; and exported and
loaded by hand. Whole first calls are counted. The exit status is 1 if, in the geometric mean,
onnxrt or ov takes more than 1.5 times as long as by hand, inductor_freezing more than 0.6 times as
long as inductor, openxla a quarter of that, or a second process more than 0.6 times as long as the
first.

With --steps: CPU seconds of the parts of a first compiled step of AdamW, for 100 to 1,000
parameters. The exit status is 1 if the capture of 200 takes more than 6, or of 1,000 more than 40.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.progress import track
from rich.table import Table

import dynamo_backends
import harness
from dynamo_backends.bench.results_files import ResultError
from dynamo_backends.bench.suites.case import call
from dynamo_backends.workers.memory import peak_rss_bytes, rss_bytes
from harness import captures, compilations
from harness.kept import Kept, measure_left

OPTIONS: dict[str, dict[str, Any]] = {"openxla": {"cache": False}}
"""What switches a backend's own disk cache off."""

SHARES = "comparison"
CAPTURES = "captures"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if a limit was given and is exceeded."""
    settings = parse(arguments)
    if settings.table:
        return print_table(settings)
    if settings.steps:
        return print_captures(settings)
    if settings.child:
        return child(settings.model, settings.child, settings.batch, settings.verify)
    if settings.share:
        return print_shares(settings)
    console = harness.announce()
    backends = [settings.backend, settings.against]
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in backends}
    order = [name for _ in range(settings.rounds) for name in backends]
    for name in track(order, "compiling", console=console, transient=True):
        seconds[name].append(in_a_process(settings, name))
    medians = {n: statistics.median(r["compile_s"] for r in rs) for n, rs in seconds.items()}
    ratio = medians[settings.against] / medians[settings.backend]
    table = Table("backend", "compile s", "of it in the backend s", title=settings.model)
    for name, runs in seconds.items():
        inside = statistics.median(run["backend_s"] for run in runs)
        table.add_row(name, f"{medians[name]:.2f}", f"{inside:.2f}" if inside else "?")
    console.print(table)
    console.print(f"{settings.backend} compiles {ratio:.2f} × as fast as {settings.against}")
    if settings.json:
        harness.save_json(settings.json, "compile time", [seconds], settings=vars(settings))
    return 1 if settings.at_least is not None and ratio < settings.at_least else 0


def print_table(settings: argparse.Namespace) -> int:
    """Measures what is left of the table, and prints it; the exit status."""
    if settings.child:
        return compilations.child(settings.child, settings.batch)
    console = harness.announce()
    every = compilations.cases(settings.batch)
    try:
        chosen = harness.find_cases(every, settings.models) if settings.models else every
        context = {**harness.environment(), "batch": settings.batch}
        kept = Kept(settings.json, "compilations", context)
    except (ValueError, ResultError) as error:
        console.print(f"[red]{error}[/]", highlight=False)
        return 2
    models = [case.name for case in chosen]
    names = [f"{model}/{who}" for model in models for who in compilations.WHO]

    def measure(name: str) -> dict[str, Any]:
        return compilations.in_processes(__file__, name, settings.batch)

    left = measure_left(names, kept, measure, console, settings.minutes)
    console.print(compilations.table(models, kept.results))
    found = compilations.problems(models, kept.results)
    for text in compilations.means(models, kept.results):
        if text not in found:
            console.print(text, highlight=False)
    for text in found:
        console.print(f"[red]{text}[/]", highlight=False)
    if left:
        console.print(f"{left} are left" + "; the same command goes on" * bool(settings.json))
    return 1 if found else 0


def published(content: Mapping[str, Any]) -> list[Table | str]:
    """What a file of the results of --table or --share says, for a page."""
    results = content["results"]
    if content["kind"] == SHARES:
        return shares(results)
    if content["kind"] == CAPTURES:
        return [captures.table(results)]
    models = list(dict.fromkeys(name.partition("/")[0] for name in results))
    return [compilations.table(models, results), *compilations.means(models, results)]


def print_shares(settings: argparse.Namespace) -> int:
    """Prints the comparison's share of the first call of each model; 1 if one is over the limit."""
    console = harness.announce()
    names = settings.models or [case.name for case in harness.suite("classic")]
    rows = []
    for name in track(names, "compiling", console=console, transient=True):
        settings.model = name
        first, off = (in_a_process(settings, settings.backend, v) for v in ("first", "off"))
        rows.append({"model": name, "first": first, "off": off})
    for part in shares(rows):
        console.print(part)
    if settings.json:
        harness.save_json(settings.json, SHARES, rows, settings=vars(settings))
    return 1 if settings.at_most is not None and max(map(share, rows)) > settings.at_most else 0


def print_captures(settings: argparse.Namespace) -> int:
    """Measures the capture of steps, and prints it; 1 if one takes longer than it may."""
    if settings.child:
        parameters, backend = settings.child.split("/")
        return captures.child(int(parameters), backend)
    console = harness.announce()
    names = [
        f"{parameters}/{backend}"
        for backend in settings.backends
        for parameters in settings.parameters
    ]
    rows = []
    for name in track(names, "compiling", console=console, transient=True):
        parameters, backend = name.split("/")
        with tempfile.TemporaryDirectory() as folder:
            caches = {"DYNAMO_BACKENDS_CACHE": folder}
            seconds = harness.run_child([__file__, "--steps", "--child", name], caches)
        rows.append({"parameters": int(parameters), "backend": backend, **seconds})
    console.print(captures.table(rows))
    found = captures.problems(rows)
    for text in found:
        console.print(f"[red]{text}[/]", highlight=False)
    if settings.json:
        harness.save_json(settings.json, CAPTURES, rows, settings=vars(settings))
    return 1 if found else 0


def share(row: Mapping[str, Any]) -> float:
    """The part of a first call that the comparison takes."""
    return float(row["first"]["verify_s"] / row["first"]["first_call_s"])


def shares(rows: Sequence[Mapping[str, Any]]) -> list[Table | str]:
    """One line per model, and a sentence."""
    table = Table("model", "first call s", "comparison s", "share", "grows MiB", "without", "ratio")
    for row in rows:
        first, off = row["first"], row["off"]
        numbers = f"{first['first_call_s']:.2f}", f"{first['verify_s']:.3f}", f"{share(row):.1%}"
        peaks = f"{first['growth'] / 2**20:.0f}", f"{off['growth'] / 2**20:.0f}"
        table.add_row(row["model"], *numbers, *peaks, f"{first['growth'] / off['growth']:.2f}")
    parts = [share(row) for row in rows]
    said = f"the largest share is {max(parts):.1%}, the mean {statistics.mean(parts):.1%}"
    return [table, said]


def in_a_process(
    settings: argparse.Namespace, backend: str, verify: str = "first"
) -> dict[str, float]:
    """Compiles in a fresh process with fresh cache folders."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "DYNAMO_BACKENDS_CACHE": f"{folder}/dynamo_backends",
        }
        command = [__file__, "--child", backend, "--model", settings.model]
        command += ["--batch", str(settings.batch), "--verify", verify]
        return harness.run_child(command, caches)


@torch.no_grad()
def child(model_name: str, backend: str, batch: int, verify: str) -> int:
    """Compiles once and hands the seconds back."""
    case = harness.find_case("classic", model_name, batch=batch)
    model, inputs = case.make(), case.inputs()
    options = OPTIONS.get(backend, {})
    if backend in dynamo_backends.list_backends():
        options = {**options, "verify": verify}
    before = rss_bytes()
    compiled = harness.compile_model(model, inputs, backend, options=options or None)
    growth = peak_rss_bytes() - before
    start = time.perf_counter()
    call(compiled.function, inputs)
    steady = time.perf_counter() - start
    harness.hand_back(
        compile_s=compiled.first_call_s - steady,
        backend_s=compiled.backend_s or 0.0,
        first_call_s=compiled.first_call_s,
        verify_s=sum(r.verify_seconds for r in compiled.reports),
        growth=growth,
    )
    return 0


def parse(arguments: Sequence[str] | None) -> Any:
    """Parses the command line."""
    parser = harness.process_arguments(__doc__)
    parser.add_argument("--against", default="inductor")
    parser.add_argument("--at-least", type=float, metavar="RATIO", help="smallest that passes")
    parser.add_argument("--share", action="store_true", help="what the comparison with eager takes")
    parser.add_argument("--table", action="store_true", help="twelve models, by all backends")
    parser.add_argument("--steps", action="store_true", help="the parts of a first compiled step")
    parser.add_argument(
        "--backends", nargs="+", default=["aot_eager", "openxla"], help="with --steps: only these"
    )
    parser.add_argument(
        "--parameters", nargs="+", type=int, default=list(captures.PARAMETERS), metavar="N",
        help="with --steps: of so many parameters",
    )  # fmt: skip
    parser.add_argument("--minutes", type=float, help="with --table: begin none later than that")
    parser.add_argument(
        "--models", nargs="+", metavar="NAME", help="with --share and --table: only these"
    )
    parser.add_argument("--at-most", type=float, metavar="SHARE", help="largest that passes")
    parser.add_argument("--verify", default="first", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
