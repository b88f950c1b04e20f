"""How much of each model Dynamo captures.

    python benchmarks/coverage.py
    python benchmarks/coverage.py --suites control_flow --json coverage.json

Capture is measured with the backend "eager" after one call to warm up. The exit status is 1 if a
model that is captured whole has less than 99% of its operators in graphs.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.progress import track
from rich.table import Table

import harness
from dynamo_backends.bench.suites.case import call
from dynamo_backends.capture.coverage import coverage
from dynamo_backends.capture.first_call import optimize
from dynamo_backends.capture.metering import CallCountMode

TARGET = 0.99
COLUMNS = (
    "model", "suite", "without Dynamo", "operators", "captured", "time", "calls", "mean", "largest",
    "compiled", "again",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One model."""

    model: str
    suite: str
    whole: bool  # nothing in it keeps Dynamo from capturing it as one graph
    eager_ops: int  # ATen calls of one call without Dynamo
    ops_in_graphs: int  # ATen calls of one call after a warm-up, in graphs
    ops_in_eager: int  # and outside of them
    share_of_time: float  # of graphs, in the time of these and of operators in eager
    graph_calls: int
    largest_graph: int  # ATen calls
    compiled: int  # frames that the warm-up compiled
    again: int  # how many of these were compiled again

    @property
    def ops(self) -> int:
        """ATen calls of one call after a warm-up."""
        return self.ops_in_graphs + self.ops_in_eager

    @property
    def share_of_ops(self) -> float:
        """The share of them in graphs; 0 if there were none."""
        return self.ops_in_graphs / self.ops if self.ops else 0.0

    @property
    def problem(self) -> str:
        """What is wrong; empty if nothing is."""
        if self.whole and self.share_of_ops < TARGET:
            return f"captured whole, and only {self.share_of_ops:.2%} of the operators"
        return ""

    def cells(self) -> tuple[str, ...]:
        """As a line of the table."""
        return (
            self.model + ("" if self.whole else " (breaks)"), self.suite, f"{self.eager_ops}",
            f"{self.ops}", f"{self.share_of_ops:.1%}", f"{self.share_of_time:.1%}",
            f"{self.graph_calls}", f"{self.ops_in_graphs / max(self.graph_calls, 1):.1f}",
            f"{self.largest_graph}", f"{self.compiled}", f"{self.again}",
        )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit status."""
    suites = list(harness.SUITES)
    parser = harness.arguments(__doc__)
    parser.add_argument("--suites", nargs="+", default=suites, choices=suites)
    parser.add_argument("--scale", default="test", choices=["bench", "test"], help="model sizes")
    settings = parser.parse_args(arguments)
    console = harness.make_console()
    cases = [(s, case) for s in settings.suites for case in harness.suite(s, settings.scale)]
    rows = []
    for suite, case in track(cases, "capturing", console=console, transient=True):
        rows.append(measure_case(suite, case))
        gc.collect()
    harness.report(published, settings, "coverage", [asdict(row) for row in rows], console)
    problems = [f"{row.model}: {row.problem}" for row in rows if row.problem]
    for text in problems:
        console.print(f"[red]{text}[/]")
    return int(bool(problems))


@torch.no_grad()
def measure_case(suite: str, case: harness.ModelCase) -> Row:
    """Measures one call of a model after another to warm up."""
    model, inputs = case.make(), case.inputs()
    run: Callable[..., Any] = optimize("eager")(model)
    call(model, inputs)  # some models keep what they compute at their first call
    with CallCountMode() as eager:
        call(model, inputs)
    with torch._dynamo.config.patch(allow_rnn=True), coverage() as found:
        call(run, inputs)
        call(run, inputs)  # what the first call kept may be compiled anew
        compiled, again = found.frames_compiled, len(found.recompilations)
        found.restart()
        call(run, inputs)
    return Row(
        model=case.name,
        suite=suite,
        whole="breaks" not in case.tags,
        eager_ops=eager.count,
        ops_in_graphs=found.ops_in_graphs,
        ops_in_eager=found.ops_in_eager,
        share_of_time=found.share_of_time,
        graph_calls=found.graph_calls,
        largest_graph=found.largest_graph,
        compiled=compiled,
        again=again,
    )


def published(content: Mapping[str, Any]) -> list[Table | str]:
    """The rows, and the least that is captured of what can be captured whole, in a sentence."""
    rows = [Row(**record) for record in content["results"]]
    table = harness.table(COLUMNS, [row.cells() for row in rows], left=2)
    whole = [row.share_of_ops for row in rows if row.whole]
    if not whole:
        return [table, f"Each of the {len(rows)} models has something that breaks a graph."]
    said = (
        f"Of the {len(rows)} models, {len(whole)} have nothing that breaks a graph: the least "
        f"captured of these has {min(whole):.1%} of its operators in graphs."
    )
    return [table, said]


if __name__ == "__main__":
    raise SystemExit(main())
