"""Backends for `torch.compile`: compile PyTorch models with something else than the default.

    >>> compiled = torch.compile(model, backend="openxla")

The names below are loaded on first use, so that `import torch`, which looks at this package for
`_autoload`, does not become slower.
"""

from dynamo_backends import _autoload
from dynamo_backends._lazy import lazy_names

__version__ = "0.1.0"

_PUBLIC = {
    # For whoever writes a backend (docs/backends.md).
    "Availability": "interface.backend",
    "Backend": "interface.backend",
    "Bound": "interface.executable",
    "Executable": "interface.executable",
    "Options": "interface.options",
    "Plan": "interface.plan",
    "SUPPORTED": "interface.plan",
    "Support": "interface.plan",
    "Graph": "graph.graph",
    "Input": "graph.graph",
    "Role": "graph.graph",
    "PreparedExecutable": "runtime.prepared_executables",
    "Results": "runtime.results",
    "with_prologue": "runtime.prepared_executables",
    # For whoever uses one.
    "Coverage": "capture.coverage",
    "coverage": "capture.coverage",
    "counters": "capture.process_counters",
    "Step": "aot.step",
    "compile_step": "aot.step",
    "optimize": "capture.first_call",
    "disable": "capture.coverage",
    "reset": "capture.coverage",
    "run": "capture.coverage",
    "compile_regions": "capture.compile_regions",
    "precompile": "capture.precompile",
    "PackagedModule": "package.module",
    "export": "package.exporting",
    "load": "package.loading",
    "save": "package.saving",
    "LoadedStep": "package.steps.loaded",
    "load_step": "package.steps.loading",
    "WarmUp": "capture.warming",
    "warm_up": "capture.warming",
    "BackendUnavailableError": "interface.errors",
    "CompileError": "interface.errors",
    "DeviceError": "interface.errors",
    "DoubleBackwardError": "interface.errors",
    "DynamoBackendsError": "interface.errors",
    "FallbackRefusedError": "interface.errors",
    "LoweringError": "interface.errors",
    "NormalFormError": "interface.errors",
    "OptionError": "interface.errors",
    "PackageError": "interface.errors",
    "RankError": "interface.errors",
    "SaveError": "interface.errors",
    "StepCaptureError": "interface.errors",
    "UnknownBackendError": "interface.errors",
    "VerificationError": "interface.errors",
    "Explainer": "capture.explain",
    "Explanation": "capture.explanation",
    "explain": "capture.explain",
    "compiler": "interface.compiler",
    "get_backend": "interface.registry",
    "list_backends": "interface.registry",
    "register_backend": "interface.registry",
    "Fallback": "interface.report",
    "GraphReport": "interface.report",
    "record": "interface.report",
    "TuningStatus": "autotune.status",
    "tuning_status": "autotune.status",
    "wait_for_tuning": "autotune.status",
}

__all__ = sorted(_PUBLIC)

__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)

_autoload.autoload()
