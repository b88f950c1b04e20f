"""Watches Dynamo compile a function and reports what became of it (`explain`).

Nothing that the user has compiled is touched. Dynamo's cache has regions; the function is compiled
in one of its own, with a backend object of its own and no memory of the sizes that earlier calls
had. Afterwards the cache of a function that Dynamo had not seen before is emptied; in that of a
function that the user has compiled too, what was added is made unusable, and stays as an empty
entry until `torch.compiler.reset()`. (Dynamo gives up on code with more than
`torch._dynamo.config.accumulated_recompile_limit` entries, 256.) Code that Dynamo had given up on
is looked at again.
"""

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, Self

from torch import fx

from dynamo_backends._torch_private import copy_captured, inline_regions
from dynamo_backends._torch_private import dynamo_monitoring as private
from dynamo_backends.capture.backend_resolution import refuses_eager, resolve_backend
from dynamo_backends.capture.explanation import Explanation, GraphExplanation
from dynamo_backends.capture.graph_breaks import (
    GraphBreak,
    first_line_of_code,
    function_name,
    merge_graph_breaks,
    record_graph_breaks,
)
from dynamo_backends.capture.guards import (
    Guard,
    Recompilation,
    parse_recompilation,
    read_guards,
    summarize_guards,
)
from dynamo_backends.capture.switchable_graph import SwitchableGraph
from dynamo_backends.capture.warming import compute_sum_gradients
from dynamo_backends.graph.graph import user_lines
from dynamo_backends.interface import report as reporting
from dynamo_backends.interface.report import GraphReport
from dynamo_backends.verify.bisection import bisecting


@dataclass
class CapturedGraph:
    """One graph that Dynamo captured, with compile time and the user's lines.

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
    run: SwitchableGraph | None = None


@dataclass
class _Frame:
    code: CodeType
    failures: list[str] = field(default_factory=list)


class CompilationObserver:
    """Compiles functions with a backend and records graphs, breaks and guards.

    Args:
        backend: Called with each captured graph and its inputs.
        dynamic: As for `torch.compile`.
        switched: Whether captured graphs can run in eager instead.
        refusing: See `record_graph_breaks`.
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
        self._region = private.DynamoCacheRegion(
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
            with record_graph_breaks(code, self.breaks, self._refusing):
                yield
        finally:
            self._frames.pop()
            if frame.failures:
                self.recompilations.append(parse_recompilation(frame.failures, code, self.guards))

    def _compile(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        frame = self._frames[-1]
        captured = inline_regions(gm)
        nodes = captured.graph.nodes
        operators = Counter(_operator(n) for n in nodes if n.op.startswith("call_"))
        lines = user_lines(captured.graph)
        if self._switched and captured is gm:
            captured = copy_captured(gm)  # which the backend may change
        start = time.perf_counter()
        with reporting.record() as reports:
            compiled = self._backend(gm, inputs)
        seconds = time.perf_counter() - start
        captures = frozenset(r.capture for r in reports)
        graph = CapturedGraph(frame.code, operators, seconds, captures, bool(frame.failures), lines)
        self.graphs.append(graph)
        if self._switched:
            graph.run = SwitchableGraph(compiled, captured)
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


BackendLike = str | Callable[..., Any]


def explain(
    fn: Callable[..., Any],
    /,
    *args: Any,
    backend: BackendLike = "openxla",
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    bisect: bool = False,
    slow: bool = False,
    **kwargs: Any,
) -> Explanation:
    """Compiles and calls a function once; returns a report of graphs, breaks and guards.

    The function runs, with its side effects. If results require gradients, their sum is
    differentiated, so that backward graphs are compiled; no `.grad` is written. To see
    recompilations, call it several times with an `Explainer`.

    Examples:
        >>> print(explain(model, images, backend="openxla"))

    Args:
        fn: A function or module. One that `torch.compile` returned is unwrapped.
        args: Its arguments.
        backend: A name that `torch.compile` takes, or a function from a captured graph and its
            inputs to a callable. Backends of other packages give fewer facts.
        options: Options of the backend.
        dynamic: As for `torch.compile`.
        bisect: Find the wrong operators of a graph that is wrong, by compiling parts of it. Each
            step takes a compilation. For backends of this package, and not with `verify="off"`.
        slow: Time each block beside eager, and find the slow operators of one that is slower, by
            compiling parts of it. Under the same conditions as `bisect`.
        kwargs: The function's keyword arguments. For one called like an argument of `explain`
            itself, use `Explainer`.

    Raises:
        UnknownBackendError: There is no such backend.
        OptionError: An option is unknown or wrong.
        TypeError: `backend` is neither a name nor a function of a graph and its inputs.
    """
    given = {"backend": backend, "options": options, "dynamic": dynamic}
    with Explainer(fn, **given, bisect=bisect, slow=slow) as explainer:  # type: ignore[arg-type]
        results = explainer(*args, **kwargs)
        explainer.differentiate(results)
    return explainer.explanation()


class Explainer:
    """Calls a function several times under a compiler, to see what makes it recompile.

    While it is active, other threads should not compile.

    Examples:
        >>> with Explainer(model, backend="openxla") as call:
        ...     call(torch.rand(4, 8))
        ...     call(torch.rand(5, 8))
        >>> print(call.explanation())

    Args:
        fn: A function or module. One that `torch.compile` returned is unwrapped.
        backend: As for `explain`.
        options: Options of the backend.
        dynamic: As for `torch.compile`.
        bisect: As for `explain`.
        slow: As for `explain`.
        switched: Whether `switches` can be asked for; graphs are kept for that.

    Raises:
        UnknownBackendError: There is no such backend.
        OptionError: An option is unknown or wrong.
        TypeError: `backend` is neither a name nor a function of a graph and its inputs.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        backend: BackendLike = "openxla",
        options: Mapping[str, Any] | None = None,
        dynamic: bool | None = None,
        bisect: bool = False,
        slow: bool = False,
        switched: bool = False,
    ):
        self._fn = _unwrap(fn)
        self._name = backend if isinstance(backend, str) else _name(backend)
        resolved = _resolve(backend, options, dynamic)
        refusing = self._name if refuses_eager(resolved) else ""
        self._observer = CompilationObserver(resolved, dynamic, switched, refusing)
        self._stack = contextlib.ExitStack()
        self._bisect = bisect
        self._slow = slow
        self._compiled: Callable[..., Any] | None = None
        self._calls = 0
        self._seconds = 0.0
        self._notes: list[str] = []

    def __enter__(self) -> Self:
        """Begins to watch compilations."""
        if self._bisect:
            self._stack.enter_context(bisecting())
        if self._slow:
            self._stack.enter_context(bisecting("slow"))
        region = self._stack.enter_context(self._observer.active())
        self._compiled = region(self._fn)
        return self

    def __exit__(self, *error: Any) -> None:
        """Ends, and removes what was compiled."""
        self._compiled = None
        self._stack.__exit__(*error)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function, compiled, and returns its result."""
        if self._compiled is None:
            raise RuntimeError("an Explainer can only be called inside its `with` block")
        self._calls += 1
        start = time.perf_counter()
        try:
            return self._compiled(*args, **kwargs)
        finally:
            self._seconds += time.perf_counter() - start

    def differentiate(self, results: Any) -> None:
        """Computes gradients of the sum of the results, so that backward graphs are compiled.

        Nothing is added to any `.grad`.

        Args:
            results: What a call returned; afterwards they cannot be differentiated again.
        """
        start = time.perf_counter()
        try:
            compute_sum_gradients(results)
        except RuntimeError as error:
            self._notes.append(f"The backward pass of the results failed: {error}")
        self._seconds += time.perf_counter() - start

    def switches(self) -> list[SwitchableGraph]:
        """Returns the switch between eager and compiled of each graph, in order of `graphs`.

        Raises:
            RuntimeError: The Explainer is not `switched`, or not inside its `with` block.
        """
        found = [graph.run for graph in self._observer.graphs if graph.run is not None]
        if len(found) != len(self._observer.graphs):
            raise RuntimeError(
                "graphs can be switched only inside the `with` block of Explainer(switched=True)"
            )
        return found

    def explanation(self) -> Explanation:
        """Returns the `Explanation` of all calls so far."""
        seen = self._observer
        graphs = tuple(self._graph(captured) for captured in seen.graphs)
        notes = list(self._notes)
        if not graphs and not seen.breaks:
            notes.append("Dynamo captured nothing: no operation on tensors was found.")
        reports = [report for graph in graphs for report in graph.reports]
        if not graphs or (reports and not any(map(_runs_on_backend, reports))):
            notes.append(f"Nothing was compiled: no operator runs on {self._name}.")
        return Explanation(
            getattr(self._fn, "__qualname__", type(self._fn).__name__),
            self._name,
            self._calls,
            self._seconds,
            graphs,
            merge_graph_breaks(seen.breaks),
            summarize_guards(seen.guards),
            tuple(seen.recompilations),
            tuple(notes),
        )

    def _graph(self, captured: CapturedGraph) -> GraphExplanation:
        reports = [r for r in self._observer.reports if r.capture in captured.captures]
        return GraphExplanation(
            function_name(captured.code),
            first_line_of_code(captured.code),
            dict(captured.operators.most_common()),
            captured.seconds,
            captured.recompiled,
            # copies, because a program that is still in use goes on counting
            tuple(
                dataclasses.replace(
                    r,
                    executable=None,
                    compilations=list(r.compilations),
                    events=list(r.events),
                    paces=list(r.paces),
                    unverified=list(r.unverified),
                    uncaptured=list(r.uncaptured),
                    failures=list(r.failures),
                    served=r.traffic(),
                )
                for r in reports
            ),
            captured.lines,
        )


def _runs_on_backend(report: GraphReport) -> bool:
    """Returns whether anything of a graph does, or autotune has chosen for it."""
    return bool(report.ops_on_backend or report.ops_on_inductor or report.chosen)


def _unwrap(fn: Callable[..., Any]) -> Callable[..., Any]:
    original = getattr(fn, "_orig_mod", None) or getattr(fn, "_torchdynamo_orig_callable", None)
    return fn if original is None else _unwrap(original)


def _name(backend: Callable[..., Any]) -> str:
    for attribute in ("name", "__name__"):
        name = getattr(backend, attribute, None)
        if isinstance(name, str):
            return name
    return type(backend).__name__


def _resolve(
    backend: BackendLike, options: Mapping[str, Any] | None, dynamic: bool | None
) -> Callable[..., Any]:
    found = resolve_backend(backend, options, dynamic)
    return private.backend_function(found) if isinstance(found, str) else found
