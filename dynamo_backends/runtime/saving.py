"""What functions that save a compiled graph have in common."""

from typing import Any, TypeVar

from dynamo_backends.interface.errors import CompileError
from dynamo_backends.interface.executable import Executable
from dynamo_backends.interface.report import GraphReport

E = TypeVar("E", bound=Executable)


def whole_executable(report: GraphReport, kind: type[E], vendor: str, hint: str = "") -> E:
    """Returns the executable that runs all of a compiled graph.

    Args:
        report: Of the graph.
        kind: What it has to be.
        vendor: The vendor's name, for messages.
        hint: What else to say if it is something else.

    Raises:
        CompileError: There is none; the message says why.
    """
    if report.fallbacks or report.blocks != 1:
        reasons = "; ".join(f"{f.op}: {f.reason}" for f in report.fallbacks)
        raise CompileError(
            f"only a graph that runs whole on {vendor} can be saved, and this one has "
            f"{report.ops_in_eager} operators in eager ({reasons})"
        )
    program: Any = getattr(report.executable, "static_program", None)
    if program is None:
        raise CompileError(
            "a graph with symbolic shapes is compiled once per shape; compile it with "
            "dynamic=False to save it"
        )
    blocks = getattr(program, "blocks", ())
    executable = blocks[0].executable if blocks else None
    if not isinstance(executable, kind):
        raise CompileError(f"{report.backend} did not compile this graph with {vendor}{hint}")
    return executable
