"""What torch's profiler and structured logs are asked, and told.

| what | checked |
|---|---|
| `torch.autograd.profiler._is_profiler_enabled` | 2.13* |
| `torch._logging.trace_structured`, `torch._logging._internal.trace_log` | 2.13* |
| `torch._logging._internal.register_log` | 2.13* |
| `torch._guards.CompileContext.current_compile_id`, `CompileId.from_string` | 2.13* |
"""

from collections.abc import Callable
from typing import Any

from torch.autograd import profiler


def is_profiled() -> bool:
    """Returns whether a profiler of torch's is recording, in whatever thread. Takes about 50 ns."""
    return profiler._is_profiler_enabled


def compile_id() -> str:
    """What Dynamo calls the compilation that is under way, such as "0/1"; empty: none is."""
    from torch._guards import CompileContext

    return str(CompileContext.current_compile_id() or "")


def trace_artifact(name: str, payload: Callable[[], Any], compilation: str) -> None:
    """Adds a JSON document to torch's structured logs (`TORCH_TRACE`), if anybody keeps them.

    Args:
        name: Of the document.
        payload: Makes it, of types that JSON has.
        compilation: Its `compile_id`, for documents that are made after the compilation.
    """
    from torch._guards import CompileId
    from torch._logging import _internal

    if _internal.trace_log.handlers:
        _internal.trace_structured(
            "artifact",
            metadata_fn=lambda: {"name": name, "encoding": "json"},
            payload_fn=payload,
            compile_id=CompileId.from_string(compilation or None),
        )
