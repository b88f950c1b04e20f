"""Dynamo's registry, counters and accuracy rule.

| what | checked |
|---|---|
| `torch._dynamo.lookup_backend` | 2.12+ |
| `torch._dynamo.utils`: `same`, `counters` | 2.12+ |
| `torch._dynamo.exc`: `RestartAnalysis`, `SkipFrame` | 2.11.0, 2.13.0, 2.15.0 |
| `torch._dynamo.convert_frame.compile_lock` | 2.13.0 |
| `torch._dynamo.callback_handler.__pending_callbacks_counter` | 2.13.0 |
"""

import contextlib
from collections.abc import Callable
from typing import Any


def lookup_backend(name: str) -> Callable[..., Any]:
    """The function that `torch.compile(backend=name)` calls."""
    from torch._dynamo import lookup_backend as look_up

    return look_up(name)


def dynamo_counters() -> Any:
    """Dynamo's own counts of graphs, breaks and frames."""
    from torch._dynamo.utils import counters

    return counters


def is_capturing() -> bool:
    """Whether Dynamo works on a frame, or AOT Autograd on a backward graph, in any thread."""
    from torch._dynamo import callback_handler

    name = "_CompilationCallbackHandler__pending_callbacks_counter"
    return bool(getattr(callback_handler, name, 0))


def without_captures() -> contextlib.AbstractContextManager[Any]:
    """Inside: Dynamo captures nothing in other threads; they wait."""
    from torch._dynamo.convert_frame import compile_lock

    manager: contextlib.AbstractContextManager[Any] = compile_lock
    return manager


def dynamo_control_flow() -> tuple[type[Exception], ...]:
    """Exceptions by which a compiler tells Dynamo to trace anew, or to leave a frame alone."""
    from torch._dynamo.exc import RestartAnalysis, SkipFrame

    return RestartAnalysis, SkipFrame


def same(reference: Any, result: Any, fp64_reference: Any, **settings: Any) -> bool:
    """The accuracy rule of PyTorch's own benchmark runners."""
    from torch._dynamo.utils import same as rule

    return rule(reference, result, fp64_reference, **settings)
