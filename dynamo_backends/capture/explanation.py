"""What became of a program under a compiler: the result of `explain`, as data."""

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo_backends.capture.breaks import GraphBreak
from dynamo_backends.capture.guards import Guards, Recompilation
from dynamo_backends.capture.source import Source
from dynamo_backends.interface.report import GraphReport, plain

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class GraphExplanation:
    """One graph that Dynamo captured.

    Attributes:
        function: The function that it comes from.
        source: That function's first line; None if it is the call of a module of torch's own.
        operators: How often it calls what, as Dynamo captured it, the most frequent first.
        seconds: What the backend took to compile it, without Dynamo.
        recompiled: The code had been compiled before.
        reports: What the pipeline made of it: an inference graph, or a forward and (if gradients
            were computed) a backward graph. Empty for a backend of somebody else.
        lines: The user's lines that its calls come from, "file:line, code", those with most calls
            first.
    """

    function: str
    source: Source | None
    operators: Mapping[str, int]
    seconds: float
    recompiled: bool = False
    reports: tuple[GraphReport, ...] = ()
    lines: tuple[str, ...] = ()

    @property
    def ops(self) -> int:
        """Number of calls in the graph."""
        return sum(self.operators.values())


@dataclass(frozen=True)
class Explanation:
    """What became of a function or module; `print` it, or take it as data.

    Attributes:
        function: Its name.
        backend: Name of the backend.
        calls: How often it was called.
        seconds: How long these calls took, compilation included.
        graphs: What Dynamo captured, in the order in which it did.
        breaks: Where capture stopped, and why.
        guards: Under which conditions the graphs are used again.
        recompilations: What made Dynamo compile code again.
        notes: What else one should know, in sentences.
    """

    function: str
    backend: str
    calls: int
    seconds: float
    graphs: tuple[GraphExplanation, ...]
    breaks: tuple[GraphBreak, ...]
    guards: Guards
    recompilations: tuple[Recompilation, ...]
    notes: tuple[str, ...] = ()

    @property
    def ops(self) -> int:
        """Number of calls in all captured graphs."""
        return sum(graph.ops for graph in self.graphs)

    @property
    def reports(self) -> tuple[GraphReport, ...]:
        """The reports of all functional graphs."""
        return tuple(report for graph in self.graphs for report in graph.reports)

    @property
    def chosen(self) -> list[tuple[str, int]]:
        """With autotune: how many graphs each candidate runs, the most frequent first."""
        return Counter(r.chosen for r in self.reports if r.chosen).most_common()

    def to_dict(self) -> dict[str, Any]:
        """Returns the whole explanation in types that JSON has."""
        return {f.name: plain(getattr(self, f.name)) for f in fields(self)}

    def save(self, path: str | Path) -> None:
        """Writes the explanation to a JSON file.

        Args:
            path: Of the file; it is replaced if it exists.
        """
        text = json.dumps(self.to_dict(), indent=2) + "\n"
        Path(os.path.expanduser(path)).write_text(text, encoding="utf-8")

    def __rich__(self) -> "RenderableType":
        """Returns the report, for rich's `print`."""
        from dynamo_backends.capture.render import render

        return render(self)

    def __str__(self) -> str:
        """Returns the report as plain text."""
        from dynamo_backends.capture.render import to_text

        return to_text(self)
