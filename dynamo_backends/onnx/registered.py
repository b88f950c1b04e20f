"""Which operators the exporter can lower, known without loading the lowerings.

Loading them takes a second of processor time, and a process that finds its executables on disk
needs none. So the operators' names are kept on disk, for the versions that they hold for.
"""

import functools
import hashlib
import json
import sys
from importlib.metadata import version
from typing import Any

import torch

from dynamo_backends._torch_private import OpOverload, onnx_registry
from dynamo_backends.runtime.cache import DiskCache, cache_folder

OPSET = 20
"""What `torch.onnx.export` takes by default; ONNX Runtime has kernels of its own for `Gelu`."""

_LIMIT = 1 << 20


@functools.cache
def registry() -> Any:
    """The lowerings that `torch.onnx.export(dynamo=True)` uses."""
    return onnx_registry(OPSET)


def is_registered(op: Any) -> bool:
    """Whether the exporter has a lowering of an operator."""
    if not isinstance(op, OpOverload):
        return bool(registry().is_registered(op))
    return str(op) in _names()


def registered_overloads() -> frozenset[OpOverload]:
    """Every overload of this process that the exporter has a lowering of.

    The names may come from a process that had imported more: operators that nobody has registered
    here are left out, since no graph of this process can call them.
    """
    return frozenset(op for name in _names() if (op := _overload(name)) is not None)


def _overload(name: str) -> OpOverload | None:
    op: Any = torch.ops
    for part in name.split("."):  # namespace, operator, overload
        op = getattr(op, part, None)
    return op if isinstance(op, OpOverload) else None


@functools.cache
def _names() -> frozenset[str]:
    # Operators of torchvision are there once it is imported.
    facts = (torch.__version__, version("onnxscript"), OPSET, "torchvision" in sys.modules)
    key = hashlib.sha256(repr(facts).encode()).hexdigest()
    cache = DiskCache(cache_folder() / "onnx-operators", _LIMIT, what="names of operators")
    kept = cache.get(key)
    if kept is not None:
        return frozenset(json.loads(kept["names"]))
    targets = (metas[0].fx_target for metas in registry().functions.values())
    names = sorted({str(target) for target in targets if isinstance(target, OpOverload)})
    cache.put(key, {"names": json.dumps(names).encode()})
    return frozenset(names)
