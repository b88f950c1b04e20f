"""Defines the module that `import_attribute` returns."""

import copy
import functools
import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dynamo_backends._torch_private import hidden_from_dynamo, is_autocast_on, without_autocast
from dynamo_backends.graph.symbolic_sizes import SizeWithExpression
from dynamo_backends.interface.registry import import_attribute
from dynamo_backends.interface.report import GraphReport
from dynamo_backends.package.inputs import Arguments
from dynamo_backends.package.machine import package_summary
from dynamo_backends.package.portable import Portable
from dynamo_backends.package.structure import decoded

if TYPE_CHECKING:
    from dynamo_backends.capture.explanation import Explanation


class Source(NamedTuple):
    """The file and arguments from which a module was loaded (see `import_attribute`).

    Attributes:
        path: Absolute path of the file.
        digest: Digest of the package.
        strict: See `import_attribute`.
        checkpoint: Absolute path of it, if it was given.
    """

    path: str
    digest: str
    strict: bool
    checkpoint: str | None


class PackagedModule(nn.Module):
    """A model from a package. Call it as the model was called; any thread may.

    It computes without gradients and outside of autocast. Its weights are fixed: it has no
    parameters, and `train()` and `to()` change nothing. So a deep copy shares its program and
    weights. Its pickle is the path of the package, which is loaded again.

    Args:
        name: Name of the model's class.
        backend: Name of the backend that runs it.
        portable: Makes the graph, once it is needed.
        weights: Its first inputs.
        arguments: Makes the others of the arguments of a call.
        results: Structure of what a call returns.
        run: From the list of all inputs to the outputs.
        reports: What became of the graph.
        notes: What else one should know of it, in sentences.

    Attributes:
        backend: The same.
        notes: The same.
        reports: The same.
        source: Where it was loaded from.
        machine: Versions and machine of the process that saved it.
        forms: What the file has of each part of the graph.
    """

    source: Source | None = None
    machine: Mapping[str, Any] = MappingProxyType({})
    forms: tuple[str, ...] = ()

    def __init__(
        self,
        name: str,
        backend: str,
        portable: Callable[[], Portable],
        weights: Sequence[Tensor],
        arguments: Arguments,
        results: Mapping[str, Any],
        run: Callable[[list[Any]], Sequence[Any]],
        reports: Sequence[GraphReport],
        notes: Sequence[str],
    ):
        super().__init__()
        self.notes = tuple(notes)
        self.reports = tuple(reports)
        self.backend = backend
        self._portable = portable
        self._name = name
        self._weights = tuple(weights)
        self._arguments = arguments
        self._results = pytree.tree_structure(decoded(results))
        self._run = run

    @functools.cached_property
    def portable(self) -> Portable:
        """Returns the portable form, the graph."""
        return self._portable()

    def __deepcopy__(self, memo: dict[int, Any]) -> "PackagedModule":
        """Returns a module of its own, with this one's program and weights, which do not change."""
        copied = self.__new__(type(self))
        memo[id(self)] = copied
        for name, value in vars(self).items():
            is_fixed = name in _FIXED
            object.__setattr__(copied, name, value if is_fixed else copy.deepcopy(value, memo))
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        """Loads the package again, from the same file.

        Raises:
            PicklingError: It was not loaded from a file.
        """
        if self.source is None:
            raise pickle.PicklingError(
                "a module that was not loaded from a file cannot be pickled. Save it with "
                "dynamo_backends.save, and pickle the module that dynamo_backends.load returns."
            )
        return import_attribute("dynamo_backends.package.loading:load_again"), (self.source,)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model with the arguments that it was saved for.

        Returns:
            What the model returned when it was saved; mappings are dicts, named tuples are tuples.

        Raises:
            PackageError: The arguments are others than it was saved for.
        """
        if torch.compiler.is_compiling():  # else torch._dynamo need not be there
            return _apart(self._called, self._run, args, kwargs)
        return self._called(self._run, args, kwargs)

    def in_eager(self, *args: Any, **kwargs: Any) -> Any:
        """As `forward`, by the portable form, call by call."""
        return self._called(self.portable.in_eager, args, kwargs)

    def values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Returns the inputs of the graph in a call: the weights, and tensors of the arguments.

        Raises:
            PackageError: The arguments are others than the model was saved for.
        """
        return [*self._weights, *self._arguments(args, kwargs)]

    def explain(self) -> "Explanation":
        """Returns what became of the model, as `dynamo_backends.explain` says it."""
        from dynamo_backends.capture.explanation import Explanation, GraphExplanation
        from dynamo_backends.capture.guards import Guards

        calls = self.portable.module.graph.nodes
        targets = (str(node.target) for node in calls if node.op == "call_function")
        seconds = sum(report.compile_seconds for report in self.reports)
        graph = GraphExplanation(
            self._name, None, dict(Counter(targets).most_common()), seconds, False, self.reports
        )
        return Explanation(
            self._name, self.backend, 0, seconds, (graph,), (), Guards(0, {}, ()), (), self.notes
        )

    @property
    def calls(self) -> str:
        """Returns how it is called: "x: float32[s0, 8], mask=None"."""
        return str(self._arguments)

    def extra_repr(self) -> str:
        """Returns what `print` shows of the module."""
        summary = package_summary(self.backend, self._weights, self.machine)
        return "\n".join([f"{self._name}({self.calls}), {summary}", *self.forms])

    def _called(
        self,
        run: Callable[[list[Any]], Sequence[Any]],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        with torch.no_grad():
            given = self.values(args, kwargs)
            if is_autocast_on():
                with without_autocast():
                    results = run(given)
            else:
                results = run(given)
        plain = [int(x) if isinstance(x, SizeWithExpression) else x for x in results]
        return pytree.tree_unflatten(plain, self._results)


_FIXED = frozenset(
    {
        "_arguments",
        "_portable",
        "_results",
        "_run",
        "_weights",
        "forms",
        "machine",
        "notes",
        "portable",
        "reports",
    }
)
"""Attributes that a copy shares, since nothing changes them."""


@hidden_from_dynamo
def _apart(call: Callable[..., Any], *args: Any) -> Any:
    """Makes a call that Dynamo does not trace: it is compiled already."""
    return call(*args)
