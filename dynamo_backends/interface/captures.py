"""Records what Dynamo captures during the watched calls of this thread."""

import threading
from dataclasses import dataclass


@dataclass
class Captures:
    """The graphs that Dynamo captured, compiled or reused during one call.

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
    """Notes that a backend is given a graph."""
    for call in thread.calls:
        call.graphs += 1


def note_graph_without_operators() -> None:
    """Notes that the last of these graphs has no operator."""
    for call in thread.calls:
        call.without_operators += 1


def note_reuse() -> None:
    """Notes that Dynamo runs code that it had compiled before."""
    for call in thread.calls:
        call.reused += 1
