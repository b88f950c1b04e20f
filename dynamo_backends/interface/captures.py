"""Counts graphs that Dynamo captures or reuses during watched calls of this thread."""

import threading
from dataclasses import dataclass


@dataclass
class Captures:
    """Counts of graphs that Dynamo captured, and of frames it reused, in one call.

    Attributes:
        graphs: Graphs that it handed to backends of this package.
        without_operators: Those of them that have no operator.
        reused: Frames for which it had compiled code already.
    """

    graphs: int = 0
    without_operators: int = 0
    reused: int = 0


class _Thread(threading.local):
    def __init__(self) -> None:
        self.calls: list[Captures] = []


thread = _Thread()


def note_graph() -> None:
    """Counts a graph that Dynamo passed to a backend of this package."""
    for call in thread.calls:
        call.graphs += 1


def note_graph_without_operators() -> None:
    """Counts the last captured graph as one without operators."""
    for call in thread.calls:
        call.without_operators += 1


def note_reuse() -> None:
    """Counts a frame for which Dynamo reused compiled code."""
    for call in thread.calls:
        call.reused += 1
