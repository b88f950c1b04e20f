"""What becomes of models that are compiled while another process keeps a core busy.

    python benchmarks/busy_machine.py --json busy.json     # a call with the same file goes on
    python benchmarks/busy_machine.py --models resnet18 bert --backends inductor_freezing onnxrt

Each model is compiled in two processes with empty caches: on the machine as it is, and while a
planted process computes without a pause. When that is gone the two programs are called in turns.
The ratio is the first one's median time over the second one's, 1.00 if nothing is lost. The exit
status is 1 if a program that was compiled on the busy machine is more than 5% slower, by the upper
bound of the 95% interval, or if something could not be measured.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

import harness
from dynamo_backends.bench.results_files import ResultError
from dynamo_backends.bench.suites.case import call
from dynamo_backends.workers.worker_process import Lost, Say, WorkerProcess, serve
from harness.kept import Kept, Results, measure_left

BACKENDS = ("inductor_freezing", "openxla", "onnxrt", "ov")
LOST = 0.95
_PATIENCE_S = 900.0
_CALLS = 3  # of each process in a round
_BUSY = "while True: pass"


class Holder(WorkerProcess):
    """A process that compiles a model, and calls it when it is asked to.

    Args:
        folder: Of its caches.
    """

    def __init__(self, folder: str):
        super().__init__((__file__, "--child", folder))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    settings = parse(arguments)
    if settings.child:
        return child(settings.child)
    console = harness.announce()
    cases = harness.chosen_cases(settings, console)
    if not cases:
        return 2
    try:
        kept = Kept(settings.json, "busy_machine", context(settings))
    except ResultError as error:
        console.print(f"[red]{error}[/]", highlight=False)
        return 2
    names = [f"{case.name}/{backend}" for case in cases for backend in settings.backends]
    left = measure_left(names, kept, lambda n: measured(n, settings), console, settings.minutes)
    console.print(table(names, kept.results))
    found = problems(kept.results)
    for text in found:
        console.print(f"[red]{text}[/]", highlight=False)
    if left:
        console.print(f"{left} are left" + "; the same command goes on" * bool(settings.json))
    return 1 if found else 0


def context(settings: argparse.Namespace) -> dict[str, Any]:
    """What results depend on."""
    facts = {name: getattr(settings, name) for name in ("scale", "batch", "rounds", "busy")}
    return {**harness.environment(), **facts}


def measured(name: str, settings: argparse.Namespace) -> dict[str, Any]:
    """Compiles a model twice, and times both in turns.

    Raises:
        ChildError: A process was lost, or could not compile it.
    """
    model, _, backend = name.partition("/")
    given = {"model": model, "backend": backend, "scale": settings.scale, "batch": settings.batch}
    with ExitStack() as stack:
        folders = [stack.enter_context(tempfile.TemporaryDirectory()) for _ in range(2)]
        quiet, busy = (stack.enter_context(Holder(folder)) for folder in folders)
        alone = asked(quiet, {"do": "compile", **given})
        with kept_busy(settings.busy):
            disturbed = asked(busy, {"do": "compile", **given})
        times = in_turns({"quiet": quiet, "busy": busy}, settings.rounds)
    ratio = harness.speedup(times["quiet"], times["busy"])
    return {
        "ratio": ratio.value,
        "ratio_95": [ratio.low, ratio.high],
        "quiet_ms": statistics.median(times["quiet"]) * 1e3,
        "busy_ms": statistics.median(times["busy"]) * 1e3,
        "quiet_compile_s": alone["compile_s"],
        "busy_compile_s": disturbed["compile_s"],
    }


def asked(process: Holder, request: dict[str, Any]) -> dict[str, Any]:
    """An answer.

    Raises:
        ChildError: There is none, or it is a problem.
    """
    try:
        answer = process.ask(request, _PATIENCE_S)
    except Lost as lost:
        raise harness.ChildError(str(lost)) from lost
    if "problem" in answer:
        raise harness.ChildError(answer["problem"])
    return answer


@contextmanager
def kept_busy(count: int) -> Iterator[None]:
    """So many processes compute without a pause inside the block."""
    others = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def in_turns(processes: Mapping[str, Holder], rounds: int) -> dict[str, list[float]]:
    """Seconds of a call of each process, one number for each round, in a random order."""
    shuffler = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in processes}
    for _ in range(rounds):
        order = list(processes)
        shuffler.shuffle(order)
        for name in order:
            times[name].append(asked(processes[name], {"do": "call"})["seconds"])
    return times


def child(folder: str) -> int:
    """Compiles and calls, as it is asked to."""
    os.environ["DYNAMO_BACKENDS_CACHE"] = f"{folder}/cache"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/torch"
    serve(Held().answer)
    return 0


class Held:
    """What a child holds: a compiled model and its inputs."""

    def answer(self, request: dict[str, Any], _: Say) -> dict[str, Any]:
        """Does what a request says; the "problem" if that fails."""
        try:
            with torch.no_grad():
                if request.pop("do") == "compile":
                    return self._compile(**request)
                return {"seconds": self._seconds()}
        except Exception as error:
            return {"problem": f"{type(error).__name__}: {error}"}

    def _compile(self, model: str, backend: str, scale: Any, batch: int) -> dict[str, Any]:
        case = harness.find_case("classic", model, scale, batch)
        self._model, self._inputs = case.make(), case.inputs()
        compiled = harness.compile_model(self._model, self._inputs, backend)
        self._function = compiled.function
        return {"compile_s": compiled.first_call_s}

    def _seconds(self) -> float:
        """Of a call: the shortest of a few, after one that wakes threads."""
        times = []
        for _ in range(1 + _CALLS):
            start = time.perf_counter()
            call(self._function, self._inputs)
            times.append(time.perf_counter() - start)
        return min(times[1:])


def table(names: Sequence[str], results: Results) -> Table:
    """One line per model and backend."""
    shown = Table(title="compiled on a quiet machine, and while a core was busy", box=SIMPLE_HEAD)
    for head in ("model", "backend"):
        shown.add_column(head)
    for head in ("quiet ms", "busy ms", "ratio", "95%", "first call s", "busy s"):
        shown.add_column(head, justify="right")
    for name in names:
        model, _, backend = name.partition("/")
        row = results.get(name)
        if row is None or "error" in row:
            shown.add_row(model, backend, *["-" if row is None else "failed"] * 6)
            continue
        low, high = row["ratio_95"]
        times = f"{row['quiet_ms']:.1f}", f"{row['busy_ms']:.1f}"
        compiled = f"{row['quiet_compile_s']:.1f}", f"{row['busy_compile_s']:.1f}"
        ratio = f"{row['ratio']:.3f}", f"{low:.3f} to {high:.3f}"
        shown.add_row(model, backend, *times, *ratio, *compiled)
    return shown


def published(content: Mapping[str, Any]) -> list[Table | str]:
    """What a file of results says, for a page."""
    return [table(list(content["results"]), content["results"])]


def problems(results: Results) -> list[str]:
    """What is not as it should be."""
    found = [f"{name}: {row['error']}" for name, row in results.items() if "error" in row]
    return found + [
        f"{name}: {1 / row['ratio']:.2f} times as slow as compiled on a quiet machine"
        for name, row in results.items()
        if row.get("ratio_95", [1, 1])[1] < LOST
    ]


def parse(arguments: Sequence[str] | None) -> Any:
    """Parses the command line."""
    parser = harness.model_arguments(__doc__, rounds=20)
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS[:1]), metavar="NAME")
    parser.add_argument("--busy", type=int, default=1, help="so many processes compute")
    parser.add_argument("--minutes", type=float, help="begin no measurement later than that")
    parser.add_argument("--child", metavar="FOLDER", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
