"""Counts and times what runs in captured graphs and what runs in eager beside them.

The unit is the ATen call: what torch's dispatcher sees below autograd, after composite operators
were decomposed. In eager a dispatch mode sees these calls. A compiled graph does not make them any
more, so each graph is run once on fake tensors when it is captured, under such a mode, and what it
calls is added at each call of the graph. So both sides are counted by one rule, whatever the
backend.

The mode is one that Dynamo passes over (`ignore_compile_internals`): it captures what it captures
without it. It is taken off the stack while a graph runs.
"""

import contextlib
import functools
import re
import threading
import time
import unittest.mock
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import dynamo_control, find_fake_mode

_FRAME = re.compile(r"^\d+/\d+: ")
"""Reasons begin with which compilation of which frame it was; numbers differ from run to run."""


@dataclass(frozen=True, eq=False)
class GraphSize:
    """The number of ATen calls of a captured graph, and the function it comes from.

    Attributes:
        function: Where it comes from, "name (file:line)".
        ops: ATen calls that it stands for.
        exact: False if it could not be run on fake tensors: `ops` is then the number of its
            torch-level calls.
    """

    function: str
    ops: int
    exact: bool


class MeterListener(Protocol):
    """The callbacks that a `Meter` calls for each event."""

    def on_eager_op(self, name: str, seconds: float) -> None:
        """Called after an ATen call outside every graph, with its seconds."""

    def on_graph_call(self, graph: GraphSize, seconds: float) -> None:
        """Called after a captured graph ran, with its seconds."""

    def on_frame_compiled(self, function: str) -> None:
        """Called when Dynamo has compiled a frame."""

    def on_recompilation(self, function: str, reason: str) -> None:
        """Called for a frame that was compiled again, with the guard that failed."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.meters: list[Meter] = []


_thread = _Thread()


class Meter:
    """Reports this thread's eager operators, graph calls and compilations to a listener."""

    def __init__(self, listener: MeterListener):
        self._listener = listener
        self._mode = _EagerOps(self)
        self._ids: dict[str, str] = {}
        self._last_metric: Any = None
        self.paused = 0

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Meters inside the block (context manager); only graphs compiled inside are seen."""
        self._last_metric = (dynamo_control.compilation_metrics() or [None])[-1]
        thread = threading.get_ident()

        def told(code: CodeType) -> None:
            if threading.get_ident() == thread:
                self._frame_compiled(code)

        with (
            dynamo_control.intercepting_graphs(_watched),
            dynamo_control.watching_compiled_frames(told),
        ):
            _thread.meters.append(self)
            try:
                with self._mode:
                    yield
            finally:
                _thread.meters.remove(self)
                self.report_recompilations()

    def report_eager_op(self, name: str, seconds: float) -> None:
        """Reports an eager ATen call to the listener."""
        self._listener.on_eager_op(name, seconds)

    def run_graph(self, graph: GraphSize, call: Callable[[], Any]) -> Any:
        """Runs a graph, times it, and reports it to the listener."""
        self.paused += 1
        try:
            with dynamo_control.popping_dispatch_mode(self._mode):
                start = time.perf_counter()
                result = call()
                seconds = time.perf_counter() - start
        finally:
            self.paused -= 1
        self._listener.on_graph_call(graph, seconds)
        return result

    def report_recompilations(self) -> None:
        """Reports the recompilations that Dynamo recorded since the last report."""
        metrics = dynamo_control.compilation_metrics()
        start = next((i for i, m in enumerate(metrics, 1) if m is self._last_metric), 0)
        for metric in metrics[start:]:
            function = self._ids.get(str(metric.compile_id))
            if function is not None and metric.recompile_reason is not None:
                reason = _FRAME.sub("", metric.recompile_reason)
                self._listener.on_recompilation(function, reason)
        if metrics:
            self._last_metric = metrics[-1]

    def _frame_compiled(self, code: CodeType) -> None:
        self.report_recompilations()  # before Dynamo's record, which is bounded, drops what it has
        function = describe_code(code)
        self._ids[str(dynamo_control.current_compile_id())] = function
        self._listener.on_frame_compiled(function)


class _EagerOps(dynamo_control.DynamoTransparentMode):
    def __init__(self, meter: Meter):
        super().__init__()
        self._meter = meter

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        meter = self._meter
        if (
            not _counts(func)
            or meter.paused
            or dynamo_control.current_compile_id()
            or dynamo_control.is_in_backward()
        ):
            return func(*args, **(kwargs or {}))
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        meter.report_eager_op(str(func), time.perf_counter() - start)
        return result


def _watched(
    code: CodeType, gm: fx.GraphModule, compile_graph: Callable[[], Callable[..., Any]]
) -> Callable[..., Any]:
    if not _thread.meters:
        return compile_graph()
    size = count_graph_ops(describe_code(code), gm)
    compiled = compile_graph()

    @functools.wraps(compiled)
    def graph(*args: Any) -> Any:
        call = functools.partial(compiled, *args)
        for meter in _thread.meters:
            call = functools.partial(meter.run_graph, size, call)
        return call()

    return graph


def count_graph_ops(function: str, gm: fx.GraphModule) -> GraphSize:
    """Counts a captured graph's ATen calls on fake tensors; its torch calls if that fails."""
    try:
        return GraphSize(function, _count_on_fakes(gm), exact=True)
    except Exception:  # any operator may lack a fake implementation
        calls = sum(node.op in ("call_function", "call_method") for node in gm.graph.nodes)
        return GraphSize(function, calls, exact=False)


class CallCountMode(dynamo_control.DynamoTransparentMode):
    """A dispatch mode that counts ATen calls."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts one call and makes it."""
        self.count += _counts(func)
        return func(*args, **(kwargs or {}))


def _counts(func: Any) -> bool:
    """Returns whether a call counts as an operator; queries of a fake tensor's device do not."""
    return getattr(func, "namespace", None) != "prim"


def _count_on_fakes(gm: fx.GraphModule) -> int:
    examples = [n.meta["example_value"] for n in gm.graph.nodes if n.op == "placeholder"]
    mode = find_fake_mode(examples)
    calls = CallCountMode()
    if mode is None:  # it has no tensor inputs
        raise ValueError("no fake tensors")
    with contextlib.ExitStack() as stack:
        stack.enter_context(unittest.mock.patch.object(mode, "allow_non_fake_inputs", True))
        if mode.shape_env is not None:
            stack.enter_context(mode.shape_env.suppress_guards())
            stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
        stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
        stack.enter_context(mode)
        arguments = [_fresh(x) for x in examples]
        with calls:
            gm(*arguments)
    return calls.count


def _fresh(example: Any) -> Any:
    """Returns a fake tensor like it, which the graph may change."""
    if not isinstance(example, Tensor):
        return example
    made = torch.empty_strided(
        example.size(),
        example.stride(),
        dtype=example.dtype,
        device=example.device,
        requires_grad=example.requires_grad,
    )
    return made.view_as(made) if example.requires_grad else made


def describe_code(code: CodeType) -> str:
    """Formats a code object as "name (file:line)"."""
    return f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
