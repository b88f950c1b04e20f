"""A backend whose compiled blocks are parts of a package."""

import hashlib
import sys
from collections.abc import Collection, Mapping
from typing import Any

from dynamo_backends._torch_private import OpOverload
from dynamo_backends.graph.fingerprint import fingerprint
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.symbolic_sizes import has_size_expressions
from dynamo_backends.interface import protocols
from dynamo_backends.interface.backend import Availability, Backend
from dynamo_backends.interface.errors import CompileError
from dynamo_backends.interface.executable import Executable
from dynamo_backends.interface.plan import Plan
from dynamo_backends.interface.protocols import BucketRule

WIDE = 2
"""Ratio of a bound of sizes to the one before it, about."""


_SAME = (
    *("name", "summary", "Options", "trains", "dynamic_shapes", "is_verified", "same_as"),
    *("serves_ranges", "depends_on_ranges", "packages", "optional_packages", "install"),
)


class InMemoryParts:
    """Stores serialized parts of executables in memory, by their keys.

    Args:
        parts: By key: those of a package, which were compared with eager when it was saved.
    """

    def __init__(self, parts: Mapping[str, Mapping[str, bytes]] | None = None):
        self.parts = dict(parts or {})
        self._saved = tuple(self.parts.values())

    def is_saved(self, parts: Mapping[str, bytes]) -> bool:
        """Returns whether parts are the package's, and not of what this process has compiled."""
        return any(parts is saved for saved in self._saved)

    def get(self, key: str) -> Mapping[str, bytes] | None:
        """See `Parts.get`."""
        return self.parts.get(_hashed(key))

    def put(self, key: str, parts: Mapping[str, bytes]) -> None:
        """See `Parts.put`."""
        self.parts[_hashed(key)] = parts

    def drop(self, key: str) -> None:
        """See `Parts.drop`."""
        self.parts.pop(_hashed(key), None)


class PackageBackend(Backend):
    """Another backend, with decisions and executables that are kept in a package.

    Args:
        inner: What decides and compiles where the package has nothing.
        kept: Gets, or has, the executables.
        plans: Gets, or has, what was decided about calls.
        is_sealed: Whether nothing is to be compiled that the package does not have.
    """

    def __init__(
        self,
        inner: Backend,
        kept: InMemoryParts,
        plans: dict[str, dict[str, Any]],
        is_sealed: bool = False,
    ):
        for name in _SAME:
            setattr(self, name, getattr(inner, name))
        self.inner = inner
        self.kept: InMemoryParts = kept
        self.plans = plans
        self._is_sealed = is_sealed

    def availability(self) -> Availability:
        """See `Backend.availability`."""
        return self.inner.availability()

    def plan(self, graph: Graph, options: Any) -> Plan:
        """See `Backend.plan`: as it was decided when the package was saved."""
        key = _mark(graph)
        known = self.plans.get(key)
        if known is not None:
            return Plan(dict(known["eager"]), frozenset(known["decomposed"]))
        made = self.inner.plan(graph, options)
        if not self._is_sealed:
            self.plans[key] = {"eager": dict(made.eager), "decomposed": sorted(made.decomposed)}
        return made

    def compile(self, graph: Graph, options: Any) -> Executable:
        """See `Backend.compile`: what the package does not have."""
        if self._is_sealed:
            raise CompileError("the package has no executable for these sizes")
        return self.inner.compile(graph, options)

    def cache_key(self, options: Any) -> str | None:
        """See `SavesExecutables.cache_key`: executables are kept in the package alone."""
        return None

    def load(self, parts: Mapping[str, bytes], graph: Graph, options: Any) -> Executable:
        """See `SavesExecutables.load`."""
        made = protocols.load_executable(self.inner, parts, graph, options)
        made.was_compared = self.kept.is_saved(parts)
        return made

    def buckets(self, options: Any) -> BucketRule | None:
        """See `PadsShapes.buckets`: wide ones alone, and none for single sizes.

        So that the bounds are those that were compiled when the package was saved.
        """
        rule = protocols.buckets(self.inner, options)
        if rule is None:
            return None
        growth = rule.growth if rule.growth == 1 else max(rule.growth, WIDE)
        return BucketRule(growth, sys.maxsize, rule.named)

    def options_for_device(self, options: Any, device: str) -> Any:
        """See `OwnsDevice.options_for_device`."""
        return protocols.options_for_device(self.inner, options, device)

    def resident_device(self, options: Any) -> str | None:
        """See `OwnsDevice.resident_device`."""
        return protocols.resident_device(self.inner, options)

    def donates(self, graph: Graph, options: Any) -> bool:
        """See `UpdatesInputs.donates`."""
        return protocols.donates(self.inner, graph, options)

    def preserved_operators(self, options: Any) -> Collection[OpOverload]:
        """See `Backend.preserved_operators`."""
        return self.inner.preserved_operators(options)

    def decomposed_operators(self, options: Any) -> Collection[OpOverload]:
        """See `Backend.decomposed_operators`."""
        return self.inner.decomposed_operators(options)

    def check_graph(self, graph: Graph, options: Any) -> None:
        """See `Backend.check_graph`."""
        self.inner.check_graph(graph, options)


def _mark(graph: Graph) -> str:
    names = " ".join(node.name for node in graph.calls)
    return _hashed(f"{fingerprint(graph, has_size_expressions(graph.module.graph))} {names}")


def _hashed(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
