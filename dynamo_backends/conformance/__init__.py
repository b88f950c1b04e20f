"""Checks whether any backend for `torch.compile` does what torch promises.

`dynamo-backends conformance BACKEND` runs all checks and writes a page; `BackendConformance` makes
them tests. Names are loaded on first use: pytest imports this package to find its options.
"""

from dynamo_backends._lazy import lazy_names

_PUBLIC = {"BackendConformance": "testing"}

__all__ = sorted(_PUBLIC)

__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
