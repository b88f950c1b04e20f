"""The table of what served which calls."""

from rich.console import Console

from dynamo_backends.capture.rendering import traffic_table
from dynamo_backends.interface.report import ServedCalls


def test_sizes_in_brackets_are_no_markup():
    rows = [
        ServedCalls("padded", ("x: float32[s0≤8, 8]",), 3, 1, 0.5),
        ServedCalls("ranged", ("ids: int64[s0, s1]", "y: int64[s0]"), 1),
    ]
    console = Console(width=120)
    with console.capture() as printed:
        console.print(traffic_table(rows))
    text = printed.get()
    assert "x: float32[s0≤8, 8]" in text
    assert "ids: int64[s0, s1], y: int64[s0]" in text
