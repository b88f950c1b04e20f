"""Whether a backend for `torch.compile`, anybody's, does what torch promises.

`dynamo-backends conformance BACKEND` runs all checks and writes a page; `BackendConformance` makes
them tests. Names are loaded on first use: pytest imports this package to find its options.
"""

import importlib
from typing import Any

_PUBLIC = {"BackendConformance": "testing"}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(importlib.import_module(f"{__name__}.{_PUBLIC[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
