"""Peak memory of compiling and running a model, above that of running it in eager.

    python benchmarks/memory.py
    python benchmarks/memory.py --sizes 20 --model mobilenet_v2 --backends onnxrt ov

With `--sizes N` it is the peak of calls with N batches relative to that of calls with the largest.

Each is measured in a process of its own, which imports the same packages either way: what the XLA
runtime takes when it is merely started is shown as a line of its own. "private" leaves out pages of
files, such as the code of libraries: the system can drop those, and processes share them.
"""

import gc
import statistics
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

SIZES = ("peak", "private", "end")
Runs = Mapping[str, Sequence[Mapping[str, float]]]
"""What processes handed back, by kind."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.arguments(__doc__, rounds=3)
    parser.add_argument("--model", default="resnet50", help="of the classic suite")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--backend", default="openxla")
    parser.add_argument("--sizes", type=int, default=0, metavar="N", help="see above")
    parser.add_argument("--backends", nargs="+", metavar="NAME", help="with --sizes: several")
    settings = parser.parse_args(arguments)
    console = harness.announce()
    kinds, backends = tuple(KINDS), [settings.backend]
    if settings.sizes:
        kinds, backends = ("compiled", "many"), settings.backends or backends
    runs: dict[str, dict[str, list[Any]]] = {b: {kind: [] for kind in kinds} for b in backends}
    order = [(b, kind) for b in backends for _ in range(settings.rounds) for kind in kinds]
    for backend, kind in track(order, "measuring", console=console, transient=True):
        case = kind, settings.model, settings.batch, backend, settings.sizes
        runs[backend][kind].append(harness.call_apart(measured, *case))
    records = [of_sizes(b, runs[b]) for b in backends] if settings.sizes else [runs[backends[0]]]
    harness.report(published, settings, "memory", records, console)
    return 0


def of_sizes(backend: str, runs: Runs) -> dict[str, Any]:
    """Medians of calls with one batch and with many, and the latter over the former."""
    medians = {key: [_median(runs, key, kind) for kind in ("compiled", "many")] for key in SIZES}
    ratios = {key: many / one for key, (one, many) in medians.items()}
    return {"backend": backend, **medians, "ratios": ratios}


def published(content: Mapping[str, Any]) -> list[Table]:
    """What a file of results says, for a page."""
    settings, results = content["settings"], content["results"]
    if settings["sizes"]:
        many = f"{settings['sizes']} sizes: peak MB"
        heads = "backend", "one size: peak MB", many, "ratio", "private", "at end"
        rows = [
            [r["backend"], *(f"{peak / 1e6:.0f}" for peak in r["peak"]),
             *(f"{ratio:.2f}" for ratio in r["ratios"].values())]
            for r in results
        ]  # fmt: skip
        return [harness.table(heads, rows, settings["model"])]
    (runs,) = results
    weights = runs["eager"][0]["weights"]
    rows = []
    for kind, text in KINDS.items():
        peak, private, end = (_median(runs, key, kind) for key in SIZES)
        over = [
            x - _median(runs, key, "eager") for x, key in ((peak, "peak"), (private, "private"))
        ]
        row = [text.format(settings["backend"]), f"{peak / 1e6:.0f}", f"{over[0] / 1e6:.0f}"]
        row += [f"{over[0] / weights:.2f}", f"{private / 1e6:.0f}", f"{over[1] / weights:.2f}"]
        rows.append([*row, f"{end / 1e6:.0f}"])
    columns = (
        "run", "peak MB", "above eager MB", "× the weights", "private: peak MB", "× the weights",
        "at the end MB",
    )  # fmt: skip
    title = f"{settings['model']}: {weights / 1e6:.0f} MB of weights"
    return [harness.table(columns, rows, title)]


def _median(runs: Runs, key: str, kind: str) -> float:
    return statistics.median(run[key] for run in runs[kind])


def batches(kind: str, batch: int, sizes: int) -> Sequence[int]:
    """The sizes of the batch in a process's calls; of one with one size, the largest."""
    if not sizes:
        return (batch,)
    largest = sizes + 1  # 1 is a graph of its own
    return range(largest, 1, -1) if kind == "many" else (largest,)


@torch.no_grad()
def measured(kind: str, model_name: str, batch: int, backend: str, sizes: int) -> dict[str, int]:
    """Runs the model in this process: its largest size, and that at the end, in bytes."""
    cases = [harness.find_case("classic", model_name, batch=n) for n in batches(kind, batch, sizes)]
    model, inputs = cases[0].make(), cases[0].inputs()
    gc.collect()
    harness.reset_peak_rss()  # what making the weights took is not of interest
    watch = Watch()
    run: Callable[..., Any] = model
    if kind == "started":
        tiny = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU()).eval()
        harness.compile_model(tiny, (torch.ones(2, 4),), backend)
    if kind in ("compiled", "many"):
        run = harness.compile_model(model, inputs, backend).function
    for _ in range(CALLS):
        for case in cases:
            run(*case.inputs())
    watch.stop()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    gc.collect()
    return {
        "peak": harness.peak_rss_bytes(),
        "end": harness.rss_bytes(),
        "private": watch.peak,
        "weights": weights,
    }


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


if __name__ == "__main__":
    raise SystemExit(main())
