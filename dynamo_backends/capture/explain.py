"""`explain`: runs a function under a compiler and says what became of it.

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
from collections.abc import Callable, Mapping
from typing import Any, Self

from dynamo_backends._torch_private import watching as private
from dynamo_backends.capture.backends import refuses_eager, resolve
from dynamo_backends.capture.breaks import merge
from dynamo_backends.capture.explanation import Explanation, GraphExplanation
from dynamo_backends.capture.gradients import differentiate
from dynamo_backends.capture.guards import summarize
from dynamo_backends.capture.observer import CapturedGraph, Observer
from dynamo_backends.capture.source import function_name, start_of
from dynamo_backends.capture.switched import Switched
from dynamo_backends.interface.report import GraphReport
from dynamo_backends.verify.bisection import bisecting

BackendLike = str | Callable[..., Any]


def explain(
    fn: Callable[..., Any],
    /,
    *args: Any,
    backend: BackendLike = "openxla",
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    bisect: bool = False,
    **kwargs: Any,
) -> Explanation:
    """Calls a function or module once under a compiler and says what became of it.

    The function really runs: what it changes is changed. If results require gradients, their sum
    is differentiated too, so that the backward graphs are compiled; no `.grad` is written. To
    see recompilations, call it several times with `Explainer`.

    Examples:
        >>> print(explain(model, images, backend="openxla"))

    Args:
        fn: A function or module. One that `torch.compile` returned is unwrapped.
        args: Its arguments.
        backend: A name that `torch.compile` takes, or a function from a captured graph and its
            inputs to a callable. Backends of other packages give fewer facts.
        options: Of the backend.
        dynamic: As for `torch.compile`.
        bisect: Where a graph is wrong, parts of it are compiled alone, to find the operators that
            are. Takes a compilation for each halving. Backends of this package only, and not with
            `verify="off"`.
        kwargs: The function's keyword arguments. For one called like an argument of `explain`
            itself, use `Explainer`.

    Raises:
        UnknownBackendError: There is no such backend.
        OptionError: An option is unknown or wrong.
        TypeError: `backend` is neither a name nor a function of a graph and its inputs.
    """
    given = {"backend": backend, "options": options, "dynamic": dynamic, "bisect": bisect}
    with Explainer(fn, **given) as explainer:  # type: ignore[arg-type]
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
        options: Of the backend.
        dynamic: As for `torch.compile`.
        bisect: As for `explain`.
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
        switched: bool = False,
    ):
        self._fn = _unwrap(fn)
        self._name = backend if isinstance(backend, str) else _name(backend)
        resolved = _resolve(backend, options, dynamic)
        refusing = self._name if refuses_eager(resolved) else ""
        self._observer = Observer(resolved, dynamic, switched, refusing)
        self._stack = contextlib.ExitStack()
        self._bisect = bisect
        self._compiled: Callable[..., Any] | None = None
        self._calls = 0
        self._seconds = 0.0
        self._notes: list[str] = []

    def __enter__(self) -> Self:
        """Begins."""
        if self._bisect:
            self._stack.enter_context(bisecting())
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
            raise RuntimeError("an Explainer can be called inside its `with` block only")
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
            differentiate(results)
        except RuntimeError as error:
            self._notes.append(f"The results could not be differentiated: {error}")
        self._seconds += time.perf_counter() - start

    def switches(self) -> list[Switched]:
        """Returns what runs each captured graph, in the order of `Explanation.graphs`.

        Raises:
            RuntimeError: The Explainer is not `switched`, or not inside its `with` block.
        """
        found = [graph.run for graph in self._observer.graphs if graph.run is not None]
        if len(found) != len(self._observer.graphs):
            raise RuntimeError("only graphs of Explainer(switched=True), in its block, can switch")
        return found

    def explanation(self) -> Explanation:
        """Returns what became of the calls so far."""
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
            merge(seen.breaks),
            summarize(seen.guards),
            tuple(seen.recompilations),
            tuple(notes),
        )

    def _graph(self, captured: CapturedGraph) -> GraphExplanation:
        reports = [r for r in self._observer.reports if r.capture in captured.captures]
        return GraphExplanation(
            function_name(captured.code),
            start_of(captured.code),
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
    found = resolve(backend, options, dynamic)
    return private.backend_function(found) if isinstance(found, str) else found
