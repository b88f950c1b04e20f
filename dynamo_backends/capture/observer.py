"""Watches Dynamo compile one function, apart from everything else that is compiled."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from torch import fx

from dynamo_backends._torch_private import copy_captured
from dynamo_backends._torch_private import watching as private
from dynamo_backends.capture.breaks import GraphBreak, noted_breaks
from dynamo_backends.capture.guards import Guard, Recompilation, read_guards, recompilation
from dynamo_backends.capture.switched import Switched
from dynamo_backends.graph.graph import user_lines
from dynamo_backends.interface import report as reporting
from dynamo_backends.interface.report import GraphReport


@dataclass
class CapturedGraph:
    """One graph that Dynamo captured.

    Attributes:
        code: The code object that it comes from.
        operators: How often it calls what.
        seconds: What the backend took.
        captures: `GraphReport.capture` of what the pipeline made of it.
        recompiled: The code had been compiled before.
        lines: The user's lines that its calls come from, see `graph.graph.user_lines`.
        run: What Dynamo calls, while the observer is active; None unless it is `switched`.
    """

    code: CodeType
    operators: Counter[str]
    seconds: float
    captures: frozenset[int]
    recompiled: bool
    lines: tuple[str, ...] = ()
    run: Switched | None = None


@dataclass
class _Frame:
    code: CodeType
    failures: list[str] = field(default_factory=list)


class Observer:
    """Compiles functions with a backend and takes notes.

    Args:
        backend: Called with each captured graph and its inputs.
        dynamic: As for `torch.compile`.
        switched: Whether captured graphs can run in eager instead.
        refusing: See `noted_breaks`.
    """

    def __init__(
        self,
        backend: Callable[..., Any],
        dynamic: bool | None,
        switched: bool = False,
        refusing: str = "",
    ):
        self.graphs: list[CapturedGraph] = []
        self.breaks: list[GraphBreak] = []
        self.guards: list[Guard] = []
        self.recompilations: list[Recompilation] = []
        self.reports: list[GraphReport] = []
        self._backend = backend
        self._switched = switched
        self._refusing = refusing
        self._frames: list[_Frame] = []
        self._codes: dict[int, CodeType] = {}  # by identity: equal code is not the same code
        self._region = private.Region(
            self._compile, self._watch, self._take_guards, self._take_failure, dynamic
        )

    @contextlib.contextmanager
    def active(self) -> Iterator[Callable[[Callable[..., Any]], Callable[..., Any]]]:
        """Gives what compiles a function; at the end all that was compiled is forgotten."""
        seen = private.seen_codes()
        private.retry_skipped(seen)
        before = set(map(id, seen))
        with private.fresh_shape_history(), reporting.record() as self.reports:
            try:
                yield self._region
            finally:
                for key, code in self._codes.items():
                    self._region.forget(code, fresh=key not in before)
                self._region.close()
                self._codes.clear()
                for graph in self.graphs:
                    graph.run = None

    @contextlib.contextmanager
    def _watch(self, code: CodeType) -> Iterator[None]:
        self._codes[id(code)] = code
        frame = _Frame(code)
        self._frames.append(frame)
        try:
            with noted_breaks(code, self.breaks, self._refusing):
                yield
        finally:
            self._frames.pop()
            if frame.failures:
                self.recompilations.append(recompilation(frame.failures, code, self.guards))

    def _compile(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        frame = self._frames[-1]
        operators = Counter(_operator(n) for n in gm.graph.nodes if n.op.startswith("call_"))
        lines = user_lines(gm.graph)
        captured = copy_captured(gm) if self._switched else gm  # which the backend may change
        start = time.perf_counter()
        with reporting.record() as reports:
            compiled = self._backend(gm, inputs)
        seconds = time.perf_counter() - start
        captures = frozenset(r.capture for r in reports)
        graph = CapturedGraph(frame.code, operators, seconds, captures, bool(frame.failures), lines)
        self.graphs.append(graph)
        if self._switched:
            graph.run = Switched(compiled, captured)
            return graph.run.__call__
        return compiled

    def _take_guards(self, guards: Collection[Any]) -> None:
        self.guards += read_guards(guards, self._frames[-1].code)

    def _take_failure(self, reason: str) -> None:
        if self._frames:
            self._frames[-1].failures.append(reason)


def _operator(node: fx.Node) -> str:
    target = node.target
    if target is getattr and isinstance(node.args[1], str):  # as torch 2.13 captures `x.mT`
        return node.args[1]
    if isinstance(target, str):
        return target
    return getattr(target, "__name__", str(target))
