"""Brings every captured graph into one normal form (see docs/graph.md)."""

from dynamo_backends._lazy import lazy_names

_PUBLIC = {
    "NORMAL_FORM": "properties",
    "Pass": "properties",
    "PassSequence": "pass_sequence",
    "Property": "properties",
    "Stage": "properties",
    "Alias": "normalize",
    "Effects": "normalize",
    "Graph": "graph",
    "Input": "graph",
    "Role": "graph",
    "PASSES": "passes",
    "STAGES": "passes",
    "check": "checker",
}

__all__ = sorted(_PUBLIC)

__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
