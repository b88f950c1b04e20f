"""What served the calls of graphs with symbolic sizes, as a table."""

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from dynamo_backends.interface.report import Served

_LISTED = 20


def traffic_table(served: Iterable[Served]) -> Table:
    """Returns a row for each program and each reason for eager, the most used first.

    Args:
        served: Of one graph.
    """
    rows = sorted(served, key=lambda row: -row.calls)
    table = Table("served by", "for", "calls", "executables", "compiled in", box=None)
    for row in rows[:_LISTED]:
        table.add_row(
            row.by,
            Text(", ".join(row.shapes)),  # "[s0, 8]" is no markup
            str(row.calls),
            str(row.executables) if row.executables else "",
            f"{row.seconds:.2f} s" if row.seconds else "",
        )
    rest = rows[_LISTED:]
    if rest:
        calls, executables = sum(r.calls for r in rest), sum(r.executables for r in rest)
        seconds = f"{sum(r.seconds for r in rest):.2f} s"
        table.add_row(f"{len(rest)} more", "", str(calls), str(executables), seconds)
    return table
