"""The middle end: every graph is brought into one normal form (see docs/graph.md)."""

from dynamo_backends._lazy import lazy_names

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

__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
