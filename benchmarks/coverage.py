"""How much of each model Dynamo captures.

    python benchmarks/coverage.py
    python benchmarks/coverage.py --suites control_flow --json coverage.json

Capture is measured with the backend "eager" after one call to warm up. The exit status is 1 if a
model that is captured whole has less than 99% of its operators in graphs.
"""

import argparse
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import harness
from dynamo_backends.bench.suites.case import Scale, call
from dynamo_backends.capture.coverage import coverage
from dynamo_backends.capture.first_call import optimize
from dynamo_backends.capture.metering import CountCalls

TARGET = 0.99
COLUMNS = (
    "model",
    "suite",
    "without Dynamo",
    "operators",
    "captured",
    "time",
    "calls",
    "mean",
    "largest",
    "compiled",
    "again",
)


@dataclass(frozen=True)
class Row:
    """One model.

    Attributes:
        model: Its name.
        suite: Its suite.
        whole: Whether nothing in it keeps Dynamo from capturing it as one graph.
        eager_ops: ATen calls of one call without Dynamo.
        ops_in_graphs: ATen calls of one call after a warm-up, in graphs.
        ops_in_eager: And outside of them.
        share_of_time: The share of the time of graphs and eager operators that is graphs'.
        graph_calls: Calls of graphs.
        largest_graph: Those of the largest one.
        compiled: Frames that the warm-up compiled.
        again: How many of these were compiled again.
    """

    model: str
    suite: str
    whole: bool
    eager_ops: int
    ops_in_graphs: int
    ops_in_eager: int
    share_of_time: float
    graph_calls: int
    largest_graph: int
    compiled: int
    again: int

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
            self.model + ("" if self.whole else " (breaks)"),
            self.suite,
            f"{self.eager_ops}",
            f"{self.ops}",
            f"{self.share_of_ops:.1%}",
            f"{self.share_of_time:.1%}",
            f"{self.graph_calls}",
            f"{self.ops_in_graphs / max(self.graph_calls, 1):.1f}",
            f"{self.largest_graph}",
            f"{self.compiled}",
            f"{self.again}",
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; returns the exit status."""
    settings = parse(arguments)
    console = harness.make_console()
    rows = measure(settings.suites, settings.scale, console)
    console.print(table(rows))
    console.print(summary(rows))
    for row in rows:
        if row.problem:
            console.print(f"[red]{row.model}:[/] {row.problem}")
    if settings.json:
        records = [asdict(row) for row in rows]
        harness.save_json(settings.json, "coverage", records, settings=vars(settings))
    return int(any(row.problem for row in rows))


def measure(suites: Sequence[str], scale: Scale, console: Console) -> list[Row]:
    """Measures every model of the suites."""
    cases = [(name, case) for name in suites for case in harness.suite(name, scale)]
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    rows = []
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=len(cases))
        for name, case in cases:
            progress.update(task, description=case.name)
            rows.append(measure_case(name, case))
            progress.advance(task)
            gc.collect()
    return rows


@torch.no_grad()
def measure_case(suite: str, case: harness.ModelCase) -> Row:
    """Measures one call of a model after another to warm up."""
    model, inputs = case.make(), case.inputs()
    run: Callable[..., Any] = optimize("eager")(model)
    call(model, inputs)  # some models keep what they compute at their first call
    with CountCalls() as eager:
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


def table(rows: Sequence[Row]) -> Table:
    """The rows for people."""
    found = Table()
    for at, name in enumerate(COLUMNS):
        found.add_column(name, justify="left" if at < 2 else "right")
    for row in rows:
        found.add_row(*row.cells())
    return found


def summary(rows: Sequence[Row]) -> str:
    """The least that is captured of what can be captured whole, in a sentence."""
    whole = [row.share_of_ops for row in rows if row.whole]
    if not whole:
        return f"Each of the {len(rows)} models has something that breaks a graph."
    return (
        f"Of the {len(rows)} models, {len(whole)} have nothing that breaks a graph: the least "
        f"captured of these has {min(whole):.1%} of its operators in graphs."
    )


def published(content: Mapping[str, Any]) -> list[Table | str]:
    """What a file of results says, for a page."""
    rows = [Row(**record) for record in content["results"]]
    return [table(rows), summary(rows)]


def parse(arguments: Sequence[str] | None) -> Any:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--suites", nargs="+", default=list(harness.SUITES), choices=[*harness.SUITES]
    )
    parser.add_argument("--scale", default="test", choices=["bench", "test"], help="model sizes")
    parser.add_argument("--json", metavar="FILE", help="save the results")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
