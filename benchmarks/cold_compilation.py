"""Seconds of the processor that first calls take with empty caches, and the trials among them.

    python benchmarks/cold_compilation.py
    python benchmarks/cold_compilation.py --backends onnxrt ov tvm --layers 2 --without-table

An encoder of MiniLM's architecture (384 features, weights not trained) is called with sizes for
which Dynamo captures four graphs: the first sizes, then any length, then any batch, and a batch of
one. Each backend has a process of its own; counted is what that and its children take.
"""

import argparse
import importlib
import tempfile
import time
from collections.abc import Mapping, Sequence
from resource import RUSAGE_CHILDREN, getrusage
from typing import Any

import torch
from rich.progress import track
from rich.table import Table

import harness
from dynamo_backends.bench.torchvision_shim import import_transformers
from dynamo_backends.runtime.verdicts import Verdict, Verdicts

TRIALS = {"onnxrt": "ort", "ov": "openvino", "tvm": "tvm", "iree": "iree"}
SIZES = {"first": (4, 32), "any length": (4, 48), "any batch": (6, 40), "batch of one": (1, 17)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backends", nargs="+", default=["onnxrt", "ov"], choices=TRIALS)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--without-table", action="store_true", help="every verdict by a trial")
    parser.add_argument("--json", metavar="FILE", help="save the results")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    settings = parser.parse_args(arguments)
    if settings.child:
        return child(settings)
    console = harness.announce()
    rows = []
    for name in track(settings.backends, "compiling", console=console, transient=True):
        command = [__file__, "--child", name, "--layers", str(settings.layers)]
        command += ["--without-table"] * settings.without_table
        with tempfile.TemporaryDirectory() as folder:
            found = harness.run_child(command, {"DYNAMO_BACKENDS_CACHE": folder})
        rows.append({"backend": name, "graphs": found["graphs"]})
    console.print(table(rows))
    if settings.json:
        harness.save_json(settings.json, "cold compilation", rows, settings=vars(settings))
    return 0


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Seconds and trials of each graph, and of all."""
    found = Table("backend", *SIZES, "all", title="CPU seconds of the first call (trials made)")
    for row in rows:
        graphs = [(graph["cpu_s"], graph["trials"]) for graph in row["graphs"]]
        graphs.append((sum(s for s, _ in graphs), sum(trials for _, trials in graphs)))
        found.add_row(row["backend"], *(f"{s:.1f} ({trials})" for s, trials in graphs))
    return found


def published(content: Mapping[str, Any]) -> list[Table | str]:
    """What a file of results says, for a page."""
    return [table(content["results"])]


@torch.no_grad()
def child(settings: argparse.Namespace) -> int:
    """Compiles for all sizes, one after the other."""
    made = count_trials(settings.child, settings.without_table)
    transformers = import_transformers()
    config = transformers.BertConfig(
        hidden_size=384, num_attention_heads=12, intermediate_size=1536,
        num_hidden_layers=settings.layers,
    )  # fmt: skip
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    compiled = torch.compile(model, backend=settings.child)
    graphs = []
    for sizes in SIZES.values():
        inputs = {"input_ids": torch.randint(1000, sizes), "attention_mask": torch.ones(sizes)}
        start, trials = cpu_seconds(), len(made)
        compiled(**inputs)
        graphs.append({"cpu_s": cpu_seconds() - start, "trials": len(made) - trials})
    harness.hand_back(graphs=graphs)
    return 0


def count_trials(backend: str, without_table: bool) -> list[str]:
    """The kinds of calls that get a verdict by a trial from now on."""
    verdicts: Any = importlib.import_module(f"dynamo_backends.{TRIALS[backend]}.trial")._verdicts
    put, made = Verdicts.put, []

    def note(self: Verdicts, kind: str, verdict: Verdict, keep: bool) -> None:
        made.append(kind)
        put(self, kind, verdict, keep)

    Verdicts.put = note  # type: ignore[method-assign]
    if without_table:
        verdicts._shipped = False
    return made


def cpu_seconds() -> float:
    """Of this process, its threads and the children that have ended."""
    children = getrusage(RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


if __name__ == "__main__":
    raise SystemExit(main())
