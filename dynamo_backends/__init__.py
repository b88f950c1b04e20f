"""Backends for `torch.compile`: compile PyTorch models with something else than the default.

    >>> compiled = torch.compile(model, backend="openxla")

The names below are loaded on first use, so that `import torch`, which looks at this package for
`_autoload`, does not become slower.
"""

import importlib
from typing import Any

from dynamo_backends import _autoload

__version__ = "0.1.0"

_PUBLIC = {
    # For whoever writes a backend (docs/backends.md).
    "Availability": "backend",
    "Backend": "backend",
    "Bound": "backend",
    "Executable": "backend",
    "Options": "backend",
    "SUPPORTED": "backend",
    "Support": "backend",
    "Graph": "graph.graph",
    "Input": "graph.graph",
    "Role": "graph.graph",
    "PreparedExecutable": "toolkit.preparation",
    "Results": "toolkit.results",
    "with_prologue": "toolkit.prologue",
    # For whoever uses one.
    "Coverage": "capture.coverage",
    "coverage": "capture.coverage",
    "Step": "aot.step",
    "compile_step": "aot.step",
    "optimize": "capture.optimize",
    "disable": "capture.quiescence",
    "reset": "capture.quiescence",
    "run": "capture.quiescence",
    "BackendUnavailableError": "errors",
    "CompileError": "errors",
    "DeviceError": "errors",
    "DoubleBackwardError": "errors",
    "DynamoBackendsError": "errors",
    "FallbackRefusedError": "errors",
    "LoweringError": "errors",
    "NormalFormError": "errors",
    "OptionError": "errors",
    "SaveError": "errors",
    "StepCaptureError": "errors",
    "UnknownBackendError": "errors",
    "VerificationError": "errors",
    "Explainer": "capture.explain",
    "Explanation": "capture.explanation",
    "explain": "capture.explain",
    "compiler": "compiler_objects",
    "get_backend": "registry",
    "list_backends": "registry",
    "register_backend": "registry",
    "Fallback": "report",
    "GraphReport": "report",
    "record": "report",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(importlib.import_module(f"dynamo_backends.{_PUBLIC[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'dynamo_backends' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})


_autoload.autoload()
