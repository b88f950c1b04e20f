"""A backend against its vendor's own way: the same model, exported by hand, in a bare session.

    python benchmarks/vendor_parity.py
    python benchmarks/vendor_parity.py --models mlp resnet18 bert --limit 1.03

The compiled model and the bare one are timed interleaved, with the same number of threads and the
same thread settings. A ratio is the backend's median over the bare one's. The bare session reads
and writes memory that was bound beforehand, so it pays for no conversion at all. Of what a call
adds, the part before the backend's graph is called (Dynamo's guards on every parameter, AOT
Autograd) is shown apart. The first row is a two-layer network whose time is mostly the cost of a
call.
"""

import argparse
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from rich.progress import track
from rich.table import Table
from torch import nn

import harness
from dynamo_backends import GraphReport
from dynamo_backends.bench.exports import bare_onnxruntime, bare_openvino, tensors
from dynamo_backends.bench.suites import Inputs
from dynamo_backends.bench.suites.case import call

Call = Callable[[], Any]
CALL = "mlp"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if a limit was given and is exceeded."""
    settings = parse(arguments)
    console = harness.announce()
    makers: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {}
    named = settings.models or []
    if not named or CALL in named:
        makers[CALL] = two_layers
    if named != [CALL]:
        settings.models = [name for name in named if name != CALL]
        cases = harness.chosen_cases(settings, console)
        if not cases:
            return 2
        for case in cases:
            makers[case.name] = lambda case=case: (case.make(), case.inputs())  # type: ignore[misc]
    backends = settings.backend or list(VENDORS)
    records = []
    jobs = [(name, backend) for name in makers for backend in backends]
    for name, backend in track(jobs, "measuring", console=console, transient=True):
        with torch.no_grad():
            records.append(measure(name, backend, *makers[name](), settings))
        torch.compiler.reset()
        gc.collect()
    console.print(table(records))
    if settings.json:
        harness.save_json(settings.json, "vendor parity", records, settings=vars(settings))
    return 1 if any(exceeds(record, settings) for record in records) else 0


def measure(
    name: str, backend: str, model: nn.Module, inputs: Inputs, settings: argparse.Namespace
) -> dict[str, Any]:
    """Medians in milliseconds and their ratio.

    Raises:
        AssertionError: The bare model does not compute what the model does.
    """
    small = name == CALL
    compiled = harness.compile_model(model, inputs, backend, fullgraph=True)
    bare = VENDORS[backend](model, inputs)
    torch.testing.assert_close(bare(), tensors(call(model, inputs)), rtol=1e-2, atol=1e-3)
    runs = {"bare": bare, "compiled": lambda: call(compiled.function, inputs)}
    runs["graph"] = without_dynamo(compiled.reports[0], runs["compiled"])
    timings = harness.compare(
        runs,
        settings.rounds,
        repeat=200 if small else 1,
        lead_in=20 if small else 1,
        baseline="bare",
    )
    bare_s, compiled_s, graph_s = (timings[k].median for k in ("bare", "compiled", "graph"))
    return {
        "model": name,
        "backend": backend,
        "bare_ms": bare_s * 1e3,
        "compiled_ms": compiled_s * 1e3,
        "ratio": compiled_s / bare_s,
        "added_us": (compiled_s - bare_s) * 1e6,
        "dynamo_us": (compiled_s - graph_s) * 1e6,
        "ops_in_eager": sum(r.ops_in_eager for r in compiled.reports),
    }


def without_dynamo(report: GraphReport, call: Call) -> Call:
    """The compiled graph as AOT Autograd calls it.

    Args:
        report: Of the graph, which must be the only one.
        call: A call of the compiled model, watched once for the graph's arguments.
    """
    graph, arguments = report.executable, harness.graph_arguments(report, call)
    return lambda: graph(list(arguments))


def exceeds(record: dict[str, Any], settings: argparse.Namespace) -> bool:
    """Whether a row is beyond the limits that were given."""
    if record["model"] == CALL:
        return settings.call_limit is not None and record["added_us"] > settings.call_limit
    return settings.limit is not None and record["ratio"] > settings.limit


def two_layers() -> tuple[nn.Module, Inputs]:
    """A network that takes some microseconds."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).eval()
    return model, (torch.randn(1, 64),)


VENDORS: dict[str, Callable[[nn.Module, Inputs], Call]] = {
    "onnxrt": bare_onnxruntime,
    "ov": bare_openvino,
}
"""For each backend: what runs the model without it. A function of no arguments that returns the
list of the model's results."""


def table(records: Sequence[dict[str, Any]]) -> Table:
    """The results for people."""
    shown = Table(title="compiled against a bare session of the vendor")
    figures = ("bare ms", "compiled ms", "ratio", "added µs", "of which Dynamo", "in eager")
    for name in ("model", "backend", *figures):
        shown.add_column(name, justify="left" if name in ("model", "backend") else "right")
    for r in records:
        times = f"{r['bare_ms']:.3f}", f"{r['compiled_ms']:.3f}", f"{r['ratio']:.3f}"
        added = f"{r['added_us']:.0f}", f"{r['dynamo_us']:.0f}"
        shown.add_row(r["model"], r["backend"], *times, *added, str(r["ops_in_eager"]))
    return shown


def published(content: Mapping[str, Any]) -> list[Table | str]:
    """What a file of results says, for a page."""
    return [table(content["results"])]


def parse(arguments: Sequence[str] | None) -> Any:
    """Parses the command line."""
    parser = harness.model_arguments(__doc__, rounds=30)
    parser.add_argument("--backend", action="append", choices=list(VENDORS), help="repeatable")
    parser.add_argument("--limit", type=float, metavar="RATIO", help="largest ratio that passes")
    parser.add_argument("--call-limit", type=float, metavar="US", help="most that a call may add")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
