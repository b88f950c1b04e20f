"""Seconds of the processor that first calls take with empty caches, and the trials among them.

    python benchmarks/cold_compilation.py
    python benchmarks/cold_compilation.py --backends onnxrt ov tvm --layers 2 --without-table

An encoder of MiniLM's architecture is called with sizes for which Dynamo captures four graphs: the
first sizes, then any length, then any batch, and a batch of one. Each backend has a process of its
own; counted is what that and its children take.
"""

import importlib
import time
from collections.abc import Mapping, Sequence
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any

import torch
from rich.progress import track
from rich.table import Table

import harness
from dynamo_backends.runtime.verdicts import TrialVerdict, VerdictStore
from harness.calls import encoder, texts

TRIALS = {"onnxrt": "ort", "ov": "openvino", "tvm": "tvm", "iree": "iree"}
SIZES = {"first": (4, 32), "any length": (4, 48), "any batch": (6, 40), "batch of one": (1, 17)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.arguments(__doc__)
    parser.add_argument("--backends", nargs="+", default=["onnxrt", "ov"], choices=TRIALS)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--without-table", action="store_true", help="every verdict by a trial")
    settings = parser.parse_args(arguments)
    console = harness.announce()
    rows = []
    for name in track(settings.backends, "compiling", console=console, transient=True):
        graphs = harness.call_apart(compiled, name, settings.layers, settings.without_table)
        rows.append({"backend": name, "graphs": graphs})
    harness.report(published, settings, "cold compilation", rows, console)
    return 0


@torch.no_grad()
def compiled(backend: str, layers: int, without_table: bool) -> list[dict[str, Any]]:
    """Compiles for all sizes, one after the other; the seconds and trials of each."""
    made = count_trials(backend, without_table)
    run = torch.compile(encoder(layers), backend=backend)
    graphs = []
    for sizes in SIZES.values():
        inputs = texts(*sizes)
        start, trials = cpu_seconds(), len(made)
        run(**inputs)
        graphs.append({"cpu_s": cpu_seconds() - start, "trials": len(made) - trials})
    return graphs


def count_trials(backend: str, without_table: bool) -> list[str]:
    """The kinds of calls that get a verdict by a trial from now on."""
    verdicts: Any = importlib.import_module(f"dynamo_backends.{TRIALS[backend]}.trial")._verdicts
    put, made = VerdictStore.put, []

    def note(self: VerdictStore, kind: str, verdict: TrialVerdict, keep: bool) -> None:
        made.append(kind)
        put(self, kind, verdict, keep)

    VerdictStore.put = note  # type: ignore[method-assign]
    if without_table:
        verdicts._shipped = False
    return made


def cpu_seconds() -> float:
    """Of this process, its threads and the children that have ended."""
    children = getrusage(RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def published(content: Mapping[str, Any]) -> list[Table]:
    """Seconds and trials of each graph, and of all."""
    rows = []
    for row in content["results"]:
        graphs = [(graph["cpu_s"], graph["trials"]) for graph in row["graphs"]]
        graphs.append((sum(s for s, _ in graphs), sum(trials for _, trials in graphs)))
        rows.append([row["backend"], *(f"{s:.1f} ({trials})" for s, trials in graphs)])
    title = "CPU seconds of the first call (trials made)"
    return [harness.table(("backend", *SIZES, "all"), rows, title)]


if __name__ == "__main__":
    raise SystemExit(main())
