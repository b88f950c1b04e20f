"""Peak memory of compiling and running a model, above that of running it in eager.

    python benchmarks/memory.py
    python benchmarks/memory.py --sizes 20 --model mobilenet_v2 --backends onnxrt ov

With `--sizes N` it is the peak of calls with N batches relative to that of calls with the largest.

Each is measured in a process of its own, which imports the same packages either way: what the XLA
runtime takes when it is merely started is shown as a line of its own. "private" leaves out pages of
files, such as the code of libraries: the system can drop those, and processes share them.
"""

import argparse
import gc
import statistics
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from rich.table import Table
from torch import nn

import harness

CALLS = 3
KINDS = {
    "eager": "eager",
    "started": "eager, {} started",
    "compiled": "compiled with {}",
}
"""What runs in a process, as the table says it of a backend."""

Runs = dict[str, list[dict[str, int]]]
"""What processes handed back, by kind."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if a limit was given and is exceeded."""
    settings = parse(arguments)
    if settings.child:
        return child(settings)
    console = harness.announce()
    if settings.sizes:
        return compare_sizes(settings, console)
    runs: Runs = {kind: [] for kind in KINDS}
    order = [kind for _ in range(settings.rounds) for kind in KINDS]
    for kind in track(order, "measuring", console=console, transient=True):
        runs[kind].append(in_a_process(settings, kind, settings.backend))
    console.print(table(runs, settings.model, settings.backend))
    multiple = _above(runs, "peak", "compiled")
    console.print(f"compile and run: {multiple:.2f} × the weights above eager")
    if settings.json:
        harness.save_json(settings.json, "memory", [runs], settings=vars(settings))
    return 1 if settings.limit is not None and multiple > settings.limit else 0


def compare_sizes(settings: argparse.Namespace, console: Any) -> int:
    """Prints what calls with many batches take beside calls with one; 1 if over the limit."""
    kinds = ("compiled", "many")
    backends = settings.backends or [settings.backend]
    order = [(b, kind) for b in backends for _ in range(settings.rounds) for kind in kinds]
    runs: dict[tuple[str, str], list[dict[str, int]]] = {}
    for backend, kind in track(order, "measuring", console=console, transient=True):
        found = in_a_process(settings, kind, backend)
        runs.setdefault((backend, kind), []).append(found)
    rows = []
    for backend in backends:
        medians = {
            key: [statistics.median(r[key] for r in runs[backend, kind]) for kind in kinds]
            for key in ("peak", "private", "end")
        }
        ratios = {key: many / one for key, (one, many) in medians.items()}
        rows.append({"backend": backend, **medians, "ratios": ratios})
    console.print(sizes_table(rows, settings.model, settings.sizes))
    if settings.json:
        harness.save_json(settings.json, "memory", rows, settings=vars(settings))
    most = max(row["ratios"]["peak"] for row in rows)
    return 1 if settings.limit is not None and most > settings.limit else 0


def table(runs: Runs, model: str, backend: str) -> Table:
    """What the processes of each kind took, medians."""
    columns = ("peak MB", "above eager MB", "× the weights", "private: peak MB", "× the weights")
    found = Table("run", *columns, "at the end MB")
    found.title = f"{model}: {runs['eager'][0]['weights'] / 1e6:.0f} MB of weights"
    for kind, text in KINDS.items():
        peak, private, end = (_median(runs, key, kind) for key in ("peak", "private", "end"))
        above = (peak - _median(runs, "peak", "eager")) / 1e6
        row = [f"{peak / 1e6:.0f}", f"{above:.0f}", f"{_above(runs, 'peak', kind):.2f}"]
        row += [f"{private / 1e6:.0f}", f"{_above(runs, 'private', kind):.2f}"]
        found.add_row(text.format(backend), *row, f"{end / 1e6:.0f}")
    return found


def sizes_table(rows: Sequence[Mapping[str, Any]], model: str, sizes: int) -> Table:
    """What calls with many batches take beside calls with one."""
    many = f"{sizes} sizes: peak MB"
    found = Table("backend", "one size: peak MB", many, "ratio", "private", "at end", title=model)
    for row in rows:
        peaks = [f"{peak / 1e6:.0f}" for peak in row["peak"]]
        found.add_row(row["backend"], *peaks, *(f"{r:.2f}" for r in row["ratios"].values()))
    return found


def published(content: Mapping[str, Any]) -> list[Table | str]:
    """What a file of results says, for a page."""
    settings, rows = content["settings"], content["results"]
    if settings["sizes"]:
        return [sizes_table(rows, settings["model"], settings["sizes"])]
    return [table(rows[0], settings["model"], settings["backend"])]


def _median(runs: Runs, key: str, kind: str) -> float:
    return statistics.median(run[key] for run in runs[kind])


def _above(runs: Runs, key: str, kind: str) -> float:
    """Above eager, in multiples of the weights."""
    above = _median(runs, key, kind) - _median(runs, key, "eager")
    return above / runs["eager"][0]["weights"]


def batches(settings: argparse.Namespace) -> Sequence[int]:
    """The sizes of the batch in a child's calls; the largest one is that of a child with one."""
    if not settings.sizes:
        return (settings.batch,)
    largest = settings.sizes + 1  # 1 is a graph of its own
    return range(largest, 1, -1) if settings.child == "many" else (largest,)


def in_a_process(settings: argparse.Namespace, kind: str, backend: str) -> dict[str, Any]:
    """Runs the model in a fresh process with an empty cache folder."""
    command = [__file__, "--child", kind, "--model", settings.model]
    command += ["--batch", str(settings.batch), "--backend", backend]
    command += ["--sizes", str(settings.sizes)]
    with tempfile.TemporaryDirectory() as folder:
        return harness.run_child(command, {"DYNAMO_BACKENDS_CACHE": folder})


@torch.no_grad()
def child(settings: argparse.Namespace) -> int:
    """Runs the model and hands back the largest size of the process, in bytes."""
    cases = [
        harness.find_case("classic", settings.model, batch=batch) for batch in batches(settings)
    ]
    model, inputs = cases[0].make(), cases[0].inputs()
    gc.collect()
    harness.reset_peak_rss()  # what making the weights took is not of interest
    watch = Watch()
    run: Callable[..., Any] = model
    if settings.child == "started":
        tiny = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU()).eval()
        harness.compile_model(tiny, (torch.ones(2, 4),), settings.backend)
    if settings.child in ("compiled", "many"):
        run = harness.compile_model(model, inputs, settings.backend).function
    for _ in range(CALLS):
        for case in cases:
            run(*case.inputs())
    watch.stop()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    gc.collect()
    harness.hand_back(
        peak=harness.peak_rss_bytes(), end=harness.rss_bytes(), private=watch.peak, weights=weights
    )
    return 0


class Watch(threading.Thread):
    """Samples the private memory of this process, which the system keeps no peak of.

    Attributes:
        peak: The largest sample, in bytes; 0 where the system does not tell (only Linux does).
    """

    INTERVAL_S = 0.01

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self._stopped = threading.Event()
        self.start()

    def run(self) -> None:
        """Samples until `stop`."""
        while not self._stopped.wait(self.INTERVAL_S):
            self.peak = max(self.peak, private_bytes())

    def stop(self) -> None:
        """Takes the last sample."""
        self._stopped.set()
        self.join()


def private_bytes() -> int:
    """Resident memory that no file backs; 0 where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def parse(arguments: Sequence[str] | None) -> Any:
    """Parses the command line."""
    parser = harness.process_arguments(__doc__)
    parser.add_argument("--limit", type=float, metavar="MULTIPLE", help="largest that passes")
    parser.add_argument("--sizes", type=int, default=0, metavar="N", help="see above")
    parser.add_argument("--backends", nargs="+", metavar="NAME", help="with --sizes: several")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
