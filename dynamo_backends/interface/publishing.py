"""Sends reports to `record()` and to torch's structured logs (for tlparse).

| document | when |
|---|---|
| `dynamo_backends_graph` | a graph or a step is ready, or, beside the calls, compiled |
| `dynamo_backends_sizes` | a graph with symbols got a program: which sizes each one has served |
| `dynamo_backends_autotune` | autotune has chosen for a graph: all candidates |

The first two are `GraphReport.to_dict()`. Nothing is said of graphs that are compiled on trial.
"""

import json
import logging
from typing import Any, Literal

from dynamo_backends import _torch_private as private
from dynamo_backends.interface import report as reporting
from dynamo_backends.interface.counters import total
from dynamo_backends.interface.errors import FallbackRefusedError, suppress_and_log
from dynamo_backends.interface.report import GraphReport, to_json_types

log = logging.getLogger("dynamo_backends")

NO_OPERATORS = "There is no operator on tensors to compile."
"""Why nothing was compiled of a function that was looked at to its end."""


def publish(report: GraphReport) -> None:
    """Sends a graph's report to `record()` and structured logs; logs errors of these."""
    with suppress_and_log(report, "publishing a report"):
        reporting.send_to_recorders(report)
    log_structured_trace(report, "graph")


def publish_nothing_compiled(report: GraphReport, name: str, cause: str) -> None:
    """Warns, counts and reports that nothing of a function was compiled.

    Args:
        report: The report of a graph without operators.
        name: Name of the function or model.
        cause: Sentences that say why.
    """
    total.add(uncaptured=1)
    report.reverted = f"nothing of {name} was compiled; all of it runs in eager. {cause}"
    log.warning("%s: %s", report.backend, report.reverted)
    publish(report)


def uncaptured_error(backend: str, name: str, cause: str) -> FallbackRefusedError:
    """Returns the `fallback="error"` exception for a call that compiled nothing."""
    return FallbackRefusedError(
        f"{backend}: nothing of {name} was compiled. {cause} "
        'With fallback="eager" all of it would run in eager.'
    )


def log_structured_trace(
    report: GraphReport, document: Literal["graph", "sizes", "autotune"]
) -> None:
    """Writes a report as an artifact to torch's structured logs, if enabled.

    Args:
        report: What is told of.
        document: Which one.
    """
    if reporting.is_trial_thread():
        return

    def payload() -> Any:
        made = _decision(report) if document == "autotune" else report.to_dict()
        # An error may be infinite or NaN, for which JSON, as tlparse reads it, has no number.
        return json.loads(json.dumps(made), parse_constant=str)

    with suppress_and_log(report, "writing torch's structured logs"):
        private.trace_artifact(f"dynamo_backends_{document}", payload, report.compile_id)


def _decision(report: GraphReport) -> dict[str, Any]:
    candidates = to_json_types(report.candidates)
    return {"graph": report.title, "chosen": report.chosen, "candidates": candidates}
