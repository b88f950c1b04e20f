"""Hands reports to whoever records, and to torch's structured logs, which tlparse shows.

| document | when |
|---|---|
| `dynamo_backends_graph` | a graph or a step is ready, or, beside the calls, compiled |
| `dynamo_backends_sizes` | a graph with symbols got a program: which sizes each one has served |
| `dynamo_backends_autotune` | autotune has chosen for a graph: all candidates |

The first two are `GraphReport.to_dict()`. Nothing is said of graphs that are compiled on trial.
"""

import json
from typing import Any, Literal

from dynamo_backends import _torch_private as private
from dynamo_backends.interface import report as reporting
from dynamo_backends.interface.containment import done_without
from dynamo_backends.interface.report import GraphReport, plain


def publish(report: GraphReport) -> None:
    """Tells of a graph that is ready; what fails there is nobody's concern."""
    with done_without(report, "publishing a report"):
        reporting.publish(report)
    trace(report, "graph")


def trace(report: GraphReport, document: Literal["graph", "sizes", "autotune"]) -> None:
    """Adds a document to torch's structured logs, if anybody keeps them.

    Args:
        report: What is told of.
        document: Which one.
    """
    if reporting.is_apart():
        return

    def payload() -> Any:
        made = _decision(report) if document == "autotune" else report.to_dict()
        # An error may be infinite or NaN, for which JSON, as tlparse reads it, has no number.
        return json.loads(json.dumps(made), parse_constant=str)

    with done_without(report, "writing torch's structured logs"):
        private.trace_artifact(f"dynamo_backends_{document}", payload, report.compile_id)


def _decision(report: GraphReport) -> dict[str, Any]:
    candidates = plain(report.candidates)
    return {"graph": report.title, "chosen": report.chosen, "candidates": candidates}
