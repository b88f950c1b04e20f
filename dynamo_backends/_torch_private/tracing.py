"""Tracing functions to graphs, also in one thread while others call compiled functions.

| what | checked |
|---|---|
| `torch.utils._python_dispatch._disable_current_modes` | 2.11+ |
| `torch._subclasses.FakeTensorMode`, `torch._guards.detect_fake_mode` | 2.11+ |
| `torch._subclasses.fake_tensor`: `DataDependentOutputException` and the like | 2.13 |
| `torch._guards`: `TracingContext`, `tracing` | 2.11+ |
| `torch._dynamo.utils.preserve_rng_state` calls `torch.random.set_rng_state` | 2.13 |
| `torch.fx.experimental.proxy_tensor`: `make_fx`, `get_proxy_mode`, `get_proxy_slot` | 2.11+ |
| `torch._functorch.aot_autograd.aot_export_module`, its signature's mutations | 2.11+ |
| `torch._dispatch.python.enable_python_dispatcher` | 2.11+ |
| `torch._decomp.decompositions.one_layer_lstm` | 2.11+ |
| `torch.compiler._is_compiling_flag` | 2.11+ |
| `torch.fx._lazy_graph_module._use_lazy_graph_module` | 2.11+ |
| `torch._dynamo.utils._metrics_context_tls`, a metrics context's `_start_time_ns` | 2.11+ |
| `torch._inductor.config.fallback_random`, set for the calling thread alone | 2.11+ |
| `torch._functorch.config.get_hash` | 2.13 |
| `torch._subclasses.functional_tensor`: `FunctionalTensorMode`, `dispatch_functionalize` | 2.11+ |
| `torch._higher_order_ops.effects.has_effects` | 2.11+ |
"""

import contextlib
import functools
import inspect
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._decomp import decompositions as torch_decompositions
from torch._guards import detect_fake_mode
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx import _symbolic_trace
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from dynamo_backends._torch_private.forks import fork_safe_lock

disable_current_modes = _disable_current_modes

NEEDS_CONTENTS = (DataDependentOutputException, DynamicOutputShapeException)
"""What an operator raises on fake tensors if its result's value or shape follows from contents."""


def find_fake_mode(values: Any) -> FakeTensorMode | None:
    """Returns the fake mode of the fake tensors; without any, the one torch detects.

    torch's `detect_fake_mode` gives that of a compilation by Dynamo which is going on, though the
    tensors may be of a graph that is compiled inside of that one.

    Args:
        values: Tensors and other things, in lists and dicts.
    """
    fakes = (x for x in pytree.tree_leaves(values) if isinstance(x, FakeTensor))
    return next((x.fake_mode for x in fakes), None) or detect_fake_mode(values)


@contextlib.contextmanager
def suspending_compile_metrics() -> Iterator[None]:
    """Hides this thread's Dynamo metrics from a nested compilation (context manager).

    Dynamo counts a compilation's metrics; a backward graph that is compiled meanwhile, which is a
    compilation of its own, would overwrite them, and torch forbids that.
    """
    from torch._dynamo import utils

    local: Any = getattr(utils, "_metrics_context_tls", None)
    current: Any = getattr(local, "metrics_context", None)
    if current is None:
        yield
        return
    local.metrics_context = type(current)(on_exit=lambda *_: None)
    try:
        yield
    finally:
        local.metrics_context = current


def suspending_tracing_context() -> contextlib.AbstractContextManager[Any]:
    """Removes the current `TracingContext` (context manager)."""
    from torch._guards import tracing

    return tracing(None)


@contextlib.contextmanager
def entering_tracing_context(context: Any = None) -> Iterator[None]:
    """Enters a tracing context for AOT Autograd after a capture (context manager).

    Without a context it would not tell which inputs are parameters. AOT Autograd and Inductor put
    the state of torch's generator back when they are ready; that is left out, for other threads
    have drawn meanwhile.

    Args:
        context: Context of `CapturedSymbols.context`; None: sizes are taken as they are.
    """
    from torch._guards import TracingContext, tracing

    here, original = threading.current_thread(), torch.random.set_rng_state

    def set_elsewhere(state: torch.Tensor) -> None:
        if threading.current_thread() is not here:
            original(state)

    with (
        tracing(context or TracingContext(FakeTensorMode())),
        mock.patch.object(torch.random, "set_rng_state", set_elsewhere),
    ):
        yield


def capture_seconds() -> float | None:
    """Returns the seconds since Dynamo began with the frame; None outside a capture."""
    from torch._dynamo import utils

    local: Any = getattr(utils, "_metrics_context_tls", None)
    started: int = getattr(getattr(local, "metrics_context", None), "_start_time_ns", 0)
    return (time.time_ns() - started) / 1e9 if started else None


def keeping_unused_draws() -> contextlib.AbstractContextManager[Any]:
    """Keeps unused random calls in this thread's traces (context manager).

    Without them the draws that follow would differ from eager's.
    """
    from torch._inductor import config

    manager: contextlib.AbstractContextManager[Any] = config.patch(fallback_random=True)
    return manager


def settings_of_tracing() -> str:
    """Returns the torch settings that traces depend on, autocast excepted, as a string."""
    from torch._functorch import config

    backends = torch.backends
    return repr(
        (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
            torch.get_default_device(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            backends.mkldnn.enabled,
            backends.mha.get_fastpath_enabled(),
            backends.cuda.flash_sdp_enabled(),
            backends.cuda.mem_efficient_sdp_enabled(),
            backends.cuda.math_sdp_enabled(),
            config.get_hash().hex(),
        )
    )


def make_fx(fn: Callable[..., Any], decompositions: Any) -> Callable[..., fx.GraphModule]:
    """Returns a function that traces `fn` on fake tensors to an ATen graph module.

    The module's Python code is made when it is first called or read.
    """
    from torch.fx._lazy_graph_module import _use_lazy_graph_module
    from torch.fx.experimental.proxy_tensor import make_fx as trace

    def traced(*fakes: Any) -> fx.GraphModule:
        with _use_lazy_graph_module(True):
            module: fx.GraphModule = trace(fn, decomposition_table=decompositions)(*fakes)
            return module

    return traced


@contextlib.contextmanager
def setting_is_compiling(answer: bool) -> Iterator[None]:
    """Sets what `torch.compiler.is_compiling()` returns, in all threads (context manager)."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = answer
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@contextlib.contextmanager
def tracing_a_step(mode: FakeTensorMode) -> Iterator[None]:
    """Runs calls on fake tensors, with `is_compiling()` true (context manager)."""
    from torch._dispatch.python import enable_python_dispatcher

    with (
        setting_is_compiling(True), mode, enable_python_dispatcher(), keeping_unused_draws(),
        mock.patch.object(torch_decompositions, "one_layer_lstm", _one_layer_lstm),
    ):  # fmt: skip
        yield


_decomposed_lstm = torch_decompositions.one_layer_lstm


def _one_layer_lstm(input: Any, hidden: Any, *args: Any, **kwargs: Any) -> Any:
    """Fixes torch 2.11's LSTM decomposition, whose last states have a dimension too many."""
    output, states = _decomposed_lstm(input, hidden, *args, **kwargs)
    return output, tuple(x.view_as(h) for x, h in zip(states, hidden, strict=True))


def functionalize_graph(
    gm: fx.GraphModule, fakes: Sequence[Any], decompositions: Any
) -> tuple[fx.GraphModule, dict[int, int]]:
    """Functionalizes an ATen graph: mutations become outputs, before the others.

    Args:
        gm: An ATen graph.
        fakes: One fake tensor per placeholder.
        decompositions: Applied while tracing.

    Returns:
        The graph, whose first outputs are new contents of inputs, and for each of these the
        position of the input.
    """
    from torch._functorch.aot_autograd import aot_export_module

    exported: Any = aot_export_module(
        gm, list(fakes), trace_joint=False, decompositions=decompositions
    )
    traced, signature = exported
    places = {name: i for i, name in enumerate(signature.user_inputs)}
    updates = {**signature.buffers_to_mutate, **signature.user_inputs_to_mutate}
    outputs: Any = traced.graph.output_node().args[0]
    order = {node.name: i for i, node in enumerate(outputs) if isinstance(node, fx.Node)}
    return traced, {order[out]: places[target] for out, target in updates.items()}


def functional_trace(
    fn: Callable[..., Any], decompositions: Any, fakes: Sequence[Any]
) -> fx.GraphModule:
    """Traces a function to a functional graph; it must return the arguments it mutates.

    The function returns the arguments whose new contents are wanted.
    """
    from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize

    return make_fx(dispatch_functionalize(fn, FunctionalTensorMode()), decompositions)(*fakes)


def has_effects(op: Any) -> bool:
    """Returns whether AOT Autograd orders an operator's side effects by tokens."""
    from torch._higher_order_ops import effects

    return bool(effects.has_effects(op))


def graph_being_traced() -> fx.Graph:
    """Returns the graph that `make_fx` is recording in this thread."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    assert mode is not None
    return mode.tracer.graph


def node_of(tensor: torch.Tensor) -> fx.Node | None:
    """Returns a tensor's node in the graph that `make_fx` is recording, or None."""
    from torch.fx.experimental import proxy_tensor

    mode = proxy_tensor.get_proxy_mode()
    assert mode is not None
    slot: Any = proxy_tensor.get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


_here = threading.local()
_lock = fork_safe_lock()


class _NoPatches(_symbolic_trace._Patcher):
    """Replaces nothing: `make_fx` looks into modules, and takes attributes as they are."""

    def patch(self, *_: Any, **__: Any) -> None:
        pass

    def patch_method(self, *_: Any, **__: Any) -> None:
        pass


@contextlib.contextmanager
def _no_patches() -> Iterator[_NoPatches]:
    yield _NoPatches()


def _with_own_variables(trace: Any) -> Callable[..., fx.Graph]:
    """Returns the function with its own copy of its module's variables."""
    variables = dict(trace.__globals__, _is_fx_tracing_flag=False, _new_patcher=_no_patches)
    return FunctionType(
        trace.__code__, variables, trace.__name__, trace.__defaults__, trace.__closure__
    )


@functools.cache
def _install() -> None:
    """Patches `fx.Tracer.trace` once; the patch acts in `tracing_thread_locally` only."""
    from torch.fx.experimental.proxy_tensor import PythonKeyTracer

    original: Any = fx.Tracer.trace
    apart = _with_own_variables(inspect.unwrap(original))  # Dynamo puts a function around it

    @functools.wraps(original)
    def trace(self: fx.Tracer, *args: Any, **kwargs: Any) -> fx.Graph:
        alone = getattr(_here, "is_apart", False) and isinstance(self, PythonKeyTracer)
        return (apart if alone else original)(self, *args, **kwargs)

    fx.Tracer.trace = trace  # type: ignore[method-assign]


@contextlib.contextmanager
def tracing_thread_locally() -> Iterator[None]:
    """Makes this thread's `make_fx` invisible to other threads (context manager)."""
    with _lock:
        _install()
    before = getattr(_here, "is_apart", False)
    _here.is_apart = True
    try:
        yield
    finally:
        _here.is_apart = before
