"""The middle end: every graph is brought into one normal form (see docs/graph.md)."""

import importlib
from typing import Any

_PUBLIC = {
    "NORMAL_FORM": "properties",
    "Pass": "properties",
    "PassSequence": "passes",
    "Property": "properties",
    "Stage": "properties",
    "Alias": "effects",
    "Effects": "effects",
    "Graph": "graph",
    "Input": "roles",
    "Role": "roles",
    "PASSES": "sequence",
    "STAGES": "sequence",
    "check": "checker",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(importlib.import_module(f"dynamo_backends.graph.{_PUBLIC[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'dynamo_backends.graph' has no attribute {name!r}")
