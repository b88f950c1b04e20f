"""Measures how much of a run Dynamo captured; has `run`, `disable` and `reset` too."""

import contextlib
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, overload

from rich.console import Group
from rich.table import Table

from dynamo_backends._torch_private import dynamo_control
from dynamo_backends.capture.callback_scopes import (
    Callback,
    CallbackScope,
    Hook,
    forbid_compiled_code,
    forbid_new_compilations,
)
from dynamo_backends.capture.first_call import optimize
from dynamo_backends.capture.metering import GraphSize, Meter
from dynamo_backends.capture.rendering import RichRenderable, traffic_table
from dynamo_backends.interface.report import GraphReport, ServedCalls, record


@dataclass
class GraphCoverage:
    """What coverage counts of one captured graph: operators, calls and seconds.

    Attributes:
        function: Where it comes from, "name (file:line)".
        ops: ATen calls that it stands for.
        exact: False if `ops` is the number of its torch-level calls, for want of a better one.
        calls: How often it ran.
        seconds: How long it ran altogether.
    """

    function: str
    ops: int
    exact: bool
    calls: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class RecompiledFrame:
    """A recompiled frame and the guard that failed.

    Attributes:
        function: The frame, "name (file:line)".
        reason: The guard that failed, in Dynamo's words.
    """

    function: str
    reason: str


@dataclass
class Coverage(RichRenderable):
    """The result of `coverage`: what ran in graphs, what in eager, and why.

    Attributes:
        graphs: The captured graphs that ran, in the order of their first calls.
        eager_ops: How often each ATen operator ran outside the graphs.
        seconds_in_eager: Time of these operators, in seconds.
        frames_compiled: Number of frames that Dynamo compiled, recompilations included.
        recompilations: The recompiled frames, with the reasons.
        result: The function's result, for `coverage(fn, ...)`.
    """

    graphs: list[GraphCoverage] = field(default_factory=list)
    eager_ops: Counter[str] = field(default_factory=Counter)
    seconds_in_eager: float = 0.0
    frames_compiled: int = 0
    recompilations: list[RecompiledFrame] = field(default_factory=list)
    result: Any = field(default=None, repr=False, compare=False)
    _reports: list[GraphReport] = field(default_factory=list, repr=False, compare=False)
    _recorder: "_Recorder | None" = field(default=None, repr=False, compare=False)

    @property
    def served(self) -> tuple[ServedCalls, ...]:
        """Returns the programs or fallbacks that served dynamic-shape calls; kept on `restart`."""
        return tuple(row for report in self._reports for row in report.traffic())

    @property
    def ops_in_graphs(self) -> int:
        """Returns the number of ATen calls that ran as part of a graph."""
        return sum(graph.ops * graph.calls for graph in self.graphs)

    @property
    def ops_in_eager(self) -> int:
        """Returns the number of ATen calls that ran outside graphs."""
        return self.eager_ops.total()

    @property
    def seconds_in_graphs(self) -> float:
        """Returns the wall time of all graph calls, in seconds."""
        return sum(graph.seconds for graph in self.graphs)

    @property
    def graph_calls(self) -> int:
        """Returns the number of calls of captured graphs."""
        return sum(graph.calls for graph in self.graphs)

    @property
    def share_of_ops(self) -> float:
        """Returns the captured share of all ATen calls, 0 to 1; 0 if there were none."""
        return _share(self.ops_in_graphs, self.ops_in_eager)

    @property
    def share_of_time(self) -> float:
        """Returns the share of time spent in graphs, 0 to 1; 0 if nothing ran."""
        return _share(self.seconds_in_graphs, self.seconds_in_eager)

    @property
    def mean_ops_per_graph(self) -> float:
        """Returns the mean number of ATen calls per graph call; 0 if none was called."""
        return self.ops_in_graphs / self.graph_calls if self.graph_calls else 0.0

    @property
    def largest_graph(self) -> int:
        """Returns the number of ATen calls of the largest graph; 0 if there is none."""
        return max((graph.ops for graph in self.graphs), default=0)

    def restart(self) -> None:
        """Resets the counts, and keeps compiled code: for use after a warm-up."""
        if self._recorder is not None:
            self._recorder.restart()

    def to_dict(self) -> dict[str, Any]:
        """Returns everything except the result, in types that JSON has."""
        return {
            **{name: getattr(self, name) for name in _NUMBERS},
            "graphs": [dict(vars(graph)) for graph in self.graphs],
            "eager_ops": dict(self.eager_ops.most_common()),
            "recompilations": [dict(vars(found)) for found in self.recompilations],
            "served": [dict(vars(row)) for row in self.served],
        }

    def __rich__(self) -> Group:
        """Tables for a rich console."""
        return Group(*_tables(self))


_NUMBERS = (
    "share_of_ops",
    "share_of_time",
    "ops_in_graphs",
    "ops_in_eager",
    "seconds_in_graphs",
    "seconds_in_eager",
    "graph_calls",
    "mean_ops_per_graph",
    "largest_graph",
    "frames_compiled",
)


@overload
def coverage() -> contextlib.AbstractContextManager[Coverage]: ...


@overload
def coverage(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Coverage: ...


def coverage(
    fn: Callable[..., Any] | None = None, /, *args: Any, **kwargs: Any
) -> contextlib.AbstractContextManager[Coverage] | Coverage:
    """Measures how much of a run is captured, with any backend.

    Examples:
        >>> with coverage() as found:
        ...     compiled(images)
        >>> print(found)
        >>> coverage(model, images).share_of_ops
        1.0

    An operator is a call that reaches torch's dispatcher below autograd (`aten.addmm`, views
    included). A dispatch mode counts operators outside of graphs. The operators of a graph are
    counted once, on fake tensors, when it is captured, and added at each of its calls. So both
    numbers are those of eager, whatever the backend makes of a graph. Operators of autograd's
    backward pass are not counted: whether they are compiled is the backend's decision.

    Time in graphs is the wall time of their calls; time in eager is that of the operators' kernels,
    without Python between them. Compilation is in neither, except for what a backend compiles at
    the first call of a graph: to exclude that, call `found.restart()` after a warm-up. On devices
    that run asynchronously, the times are those of launching.

    All compiled code is dropped at the beginning, as by `reset()`, in all threads, so that every
    graph is seen. Only calls of the calling thread are counted. Results do not change. Code that is
    compiled inside stays in use afterwards, and checks at each call whether anyone is counting.

    Args:
        fn: A function or module to run once. If it is not compiled yet, it is captured with the
            backend "eager". Without it, a context manager is returned.
        args: Its arguments.
        kwargs: Its keyword arguments.
    """
    if fn is None:
        if args or kwargs:
            raise TypeError(
                "coverage() was given arguments without a function to call with them. Pass the "
                "function first."
            )
        return _measured()
    captured = fn if dynamo_control.is_compiled(fn) else optimize("eager")(fn)
    with _measured() as found:
        found.result = captured(*args, **kwargs)
    return found


@contextlib.contextmanager
def _measured() -> Iterator[Coverage]:
    reset()
    found = Coverage()
    found._recorder = recorder = _Recorder(found)
    with recorder.meter.active(), record() as found._reports:
        yield found


class _Recorder:
    """Fills in a `Coverage` with what a meter tells."""

    def __init__(self, found: Coverage):
        self.meter = Meter(self)
        self._found = found
        self._graphs: dict[GraphSize, GraphCoverage] = {}

    def on_eager_op(self, name: str, seconds: float) -> None:
        self._found.eager_ops[name] += 1
        self._found.seconds_in_eager += seconds

    def on_graph_call(self, graph: GraphSize, seconds: float) -> None:
        entry = self._graphs.get(graph)
        if entry is None:
            entry = self._graphs[graph] = GraphCoverage(graph.function, graph.ops, graph.exact)
            self._found.graphs.append(entry)
        entry.calls += 1
        entry.seconds += seconds

    def on_frame_compiled(self, function: str) -> None:
        self._found.frames_compiled += 1

    def on_recompilation(self, function: str, reason: str) -> None:
        self._found.recompilations.append(RecompiledFrame(function, reason))

    def restart(self) -> None:
        self.meter.report_recompilations()
        self._graphs.clear()
        found = self._found
        found.graphs, found.recompilations = [], []
        found.eager_ops = Counter()
        found.seconds_in_eager, found.frames_compiled = 0.0, 0


def _share(captured: float, rest: float) -> float:
    return captured / (captured + rest) if captured or rest else 0.0


def _tables(found: Coverage) -> Iterator[Table]:
    total = Table(title="Capture coverage")
    for name in ("", "in graphs", "in eager", "captured"):
        total.add_column(name, justify="right" if name else "left")
    ops = f"{found.ops_in_graphs}", f"{found.ops_in_eager}"
    times = f"{found.seconds_in_graphs * 1e3:.2f}", f"{found.seconds_in_eager * 1e3:.2f}"
    total.add_row("operators", *ops, f"{found.share_of_ops:.1%}")
    total.add_row("time, ms", *times, f"{found.share_of_time:.1%}")
    yield total
    yield _graphs_table(found)
    if found.served:
        yield traffic_table(found.served)
    if found.eager_ops:
        eager = Table("operator in eager", "times")
        for name, count in found.eager_ops.most_common(10):
            eager.add_row(name, str(count))
        yield eager
    if found.recompilations:
        again = Table("compiled again", "failed guard")
        for entry in found.recompilations:
            again.add_row(entry.function, entry.reason)
        yield again


def _graphs_table(found: Coverage) -> Table:
    table = Table("graph of", "operators", "calls", "ms per call")
    for graph in found.graphs:
        ops = f"{graph.ops}" if graph.exact else f"{graph.ops} torch calls"
        per_call = f"{graph.seconds / graph.calls * 1e3:.3f}"
        table.add_row(graph.function, ops, str(graph.calls), per_call)
    table.caption = (
        f"{found.graph_calls} calls of graphs, {found.mean_ops_per_graph:.1f} operators on average,"
        f" {found.largest_graph} at most; {found.frames_compiled} frames compiled,"
        f" {len(found.recompilations)} of them again"
    )
    return table


def run() -> "CompiledOnlyScope":
    """Runs what is compiled and compiles nothing new: the rest runs in eager.

    A shape, a dtype or a branch that was not seen before costs its eager time, never a
    compilation. This holds in the calling thread for everything inside, whether `optimize`,
    `torch.compile` or `module.compile()` made it.

    It holds for what this package's backends compile late, too: the backward graph, and executables
    for further sizes of a symbolic shape. Those of other packages may still compile these.

    Examples:
        >>> with run():
        ...     compiled(images)
        >>> serve = run()(compiled)
    """
    return CompiledOnlyScope()


def disable() -> "DisableScope":
    """Runs everything in eager, compiled code too: a decorator and a context manager like `run`.

    Inside a captured function, a call of a function under it is a graph break.

    Examples:
        >>> with disable():
        ...     expected = compiled(images)
    """
    return DisableScope()


def reset() -> None:
    """Forgets all compiled code of this process. What is cached on disk stays."""
    import torch

    torch.compiler.reset()


class CompiledOnlyScope(CallbackScope):
    """What `run()` returns: a decorator and context manager; compiles nothing new inside."""

    def __repr__(self) -> str:
        """As a call that makes it."""
        return "run()"

    def __call__(self, fn: Any) -> Any:
        """Wraps a function, generator function or module to compile nothing when called."""
        if inspect.isgeneratorfunction(fn):
            return dynamo_control.run_within(lambda: self, fn)
        return dynamo_control.wrap_to_run_only(fn, forbid_new_compilations)

    def _callback(self) -> Callback:
        return False

    def _hooks(self) -> tuple[Hook, ...]:
        return (forbid_new_compilations,)


class DisableScope(CallbackScope):
    """The decorator and context manager `disable()`: everything runs in eager."""

    def __repr__(self) -> str:
        """As a call that makes it."""
        return "disable()"

    def __call__(self, fn: Any) -> Any:
        """Returns the function, generator function or module, which always runs in eager."""
        return dynamo_control.wrap_as_disabled(fn, self._around)

    def _around(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.isgeneratorfunction(fn):
            return dynamo_control.run_within(lambda: self, fn)

        @functools.wraps(fn)
        def in_eager(*args: Any, **kwargs: Any) -> Any:
            with self:
                return fn(*args, **kwargs)

        return in_eager

    def _callback(self) -> Callback:
        return None

    def _hooks(self) -> tuple[Hook, ...]:
        return (forbid_compiled_code,)
