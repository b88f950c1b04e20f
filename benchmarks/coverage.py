"""How much of each model Dynamo captures; writes the table in docs/coverage.md.

    python benchmarks/coverage.py
    python benchmarks/coverage.py --suites control_flow --output -

Capture is measured with the backend "eager" after one call to warm up. The exit status is 1 if a
model that is captured whole has less than 99% of its operators in graphs.
"""

import argparse
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import harness
from dynamo_backends.bench.suites.case import Scale, call
from dynamo_backends.capture.coverage import Coverage, coverage
from dynamo_backends.capture.metering import CountCalls
from dynamo_backends.capture.optimize import optimize

TARGET = 0.99
OUTPUT = Path(__file__).parents[1] / "docs/coverage.md"

HEAD = """# Capture coverage

Which share of the operators of each model Dynamo captures into graphs. For a model of your own,
call [`dynamo_backends.coverage(model, inputs)`](capture.md#coverage), which measured these.

- **without Dynamo**: ATen calls of the model in eager.
- **operators**: ATen calls inside and outside of graphs. They are as many as without Dynamo, unless
  a model takes another branch when it is being compiled, as `nn.MultiheadAttention` (vit_s_16) and
  the masks of transformers do.
- **captured**: the share of them that runs in graphs.
- **time**: the share of the time of graphs and eager operators that is spent in graphs.
- **calls**: calls of graphs; **mean** and **largest**: operators per graph.
- **compiled**, **again**: frames compiled while warming up, and how many of them were recompiled.

Models with "breaks" have graph breaks: they branch in Python on values of tensors, which are read
in eager.

Measured by `python benchmarks/coverage.py` with torch {torch} on Python {python}; models of
`benchmarks/harness` at scale "{scale}", inference, `torch._dynamo.config.allow_rnn` on; one call of
each model after one to warm up.
"""
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
        suite: Its suite.
        case: The model.
        eager_ops: ATen calls of one call without Dynamo.
        found: What one call had in graphs, after a warm-up.
        compiled: Frames that the warm-up compiled.
        again: How many of these were compiled again.
    """

    suite: str
    case: harness.ModelCase
    eager_ops: int
    found: Coverage
    compiled: int
    again: int

    @property
    def whole(self) -> bool:
        """Whether nothing in the model keeps Dynamo from capturing it as one graph."""
        return "breaks" not in self.case.tags

    @property
    def problem(self) -> str:
        """What is wrong; empty if nothing is."""
        if self.whole and self.found.share_of_ops < TARGET:
            return f"captured whole, and only {self.found.share_of_ops:.2%} of the operators"
        return ""

    def cells(self) -> tuple[str, ...]:
        """As a line of the table."""
        found = self.found
        name = self.case.name + ("" if self.whole else " (breaks)")
        return (
            name,
            self.suite,
            f"{self.eager_ops}",
            f"{found.ops_in_graphs + found.ops_in_eager}",
            f"{found.share_of_ops:.1%}",
            f"{found.share_of_time:.1%}",
            f"{found.graph_calls}",
            f"{found.mean_ops_per_graph:.1f}",
            f"{found.largest_graph}",
            f"{self.compiled}",
            f"{self.again}",
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes; returns the exit status."""
    settings = parse(arguments)
    console = harness.make_console()
    rows = measure(settings.suites, settings.scale, console)
    document = render(rows, settings.scale)
    if settings.output == "-":
        console.print(document, markup=False, highlight=False)
    else:
        Path(settings.output).write_text(document)
        console.print(f"wrote {settings.output}: {len(rows)} models")
    for row in rows:
        if row.problem:
            console.print(f"[red]{row.case.name}:[/] {row.problem}")
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
    return Row(suite, case, eager.count, found, compiled, again)


def render(rows: Sequence[Row], scale: str) -> str:
    """The document."""
    versions = harness.environment()
    head = HEAD.format(
        torch=versions["versions"]["torch"].split("+")[0],
        python=versions["python"].rpartition(".")[0],
        scale=scale,
    )
    lines = [_line(COLUMNS), _line(["---"] * 2 + ["---:"] * (len(COLUMNS) - 2))]
    lines += [_line(row.cells()) for row in rows]
    whole = [row.found.share_of_ops for row in rows if row.whole]
    summary = ""
    if whole:
        summary = (
            f"\nOf the {len(rows)} models, {len(whole)} have nothing that breaks a graph: the least"
            f" captured of these has {min(whole):.1%} of its operators in graphs.\n"
        )
    return head + "\n" + "\n".join(lines) + "\n" + summary


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def parse(arguments: Sequence[str] | None) -> Any:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--suites", nargs="+", default=list(harness.SUITES), choices=[*harness.SUITES]
    )
    parser.add_argument("--scale", default="test", choices=["bench", "test"], help="model sizes")
    parser.add_argument("--output", default=str(OUTPUT), metavar="FILE", help='"-" prints it')
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
