"""What compiled graphs and their parts are called in the traces of torch's profilers.

    <backend> <kind> graph [<capture>] [block <part> | eager <part>]

such as "openxla inference graph 1 block 1": kind and capture as in `GraphReport`, and the number of
the part among `GraphReport.parts`, counted from 1; "eager" stands before one that runs in eager.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from torch.profiler import record_function

from dynamo_backends._torch_private import is_profiled
from dynamo_backends.interface.report import GraphReport

_UNSEEN = contextlib.nullcontext()


def graph_name(report: GraphReport, backend: str = "") -> str:
    """Returns what a graph is called.

    Args:
        report: Of the graph.
        backend: Who runs it, if that is another one than the report says.
    """
    name = f"{backend or report.backend} {report.kind} graph"
    return f"{name} {report.capture}" if report.capture else name


def part_names(graph: str, on_backend: Sequence[bool]) -> list[str]:
    """Returns what the parts of a graph are called.

    Args:
        graph: Its name.
        on_backend: For each part, whether a backend runs it.
    """
    return [f"{graph} {'block' if x else 'eager'} {i}" for i, x in enumerate(on_backend, 1)]


def profiled_as(name: str) -> contextlib.AbstractContextManager[Any]:
    """A block that has a name in profilers' traces; does nothing if no profiler is recording."""
    return record_function(name) if is_profiled() else _UNSEEN


def always_named(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function whose calls have a name in profilers' traces.

    Args:
        name: Empty: none.
        run: The function.
    """
    if not name:
        return run

    def call(*args: Any) -> Any:
        with record_function(name):
            return run(*args)

    return call
