"""The backend that is checked: any that `torch.compile` takes, compared with eager."""

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn

from dynamo_backends.bench.backends import resolve_compiler
from dynamo_backends.bench.suites import Inputs, call
from dynamo_backends.bench.workload import loss
from dynamo_backends.conformance.comparing import (
    aliases,
    assert_same,
    copy_inputs,
    ensure,
    tensors,
    widen,
)
from dynamo_backends.interface.compiler import compiler
from dynamo_backends.interface.registry import get_backend, list_backends
from dynamo_backends.interface.report import GraphReport, record

SEED = 11  # before each call whose results are compared

OPERATORS: dict[str, Any] = {"cache": False, "verify": "off"}
"""Options of this package's backends: results that are wrong show, rather than eager's."""

PROGRAMS: dict[str, Any] = {**OPERATORS, "min_block_size": 1}
"""The same for programs of few operators."""

Function = Callable[..., Any]


class OwnRandomNumbersError(Exception):
    """Random numbers are not eager's; torch promises that for no backend."""


class UntriedError(Exception):
    """Raised when no reference exists that the backend could be compared with."""


def reports_itself(name: str) -> bool:
    """Returns whether a backend says what it leaves to eager: this package's do."""
    return name in list_backends()


def compiler_of(name: str, **options: Any) -> Any:
    """Returns what `torch.compile(backend=...)` takes.

    Args:
        name: See `bench.backends.require`.
        options: For a backend of this package; those that it does not have are left out.
    """
    if not reports_itself(name):
        return resolve_compiler(name)
    known = {f.name for f in fields(get_backend(name).Options)}
    return compiler(name, **{k: v for k, v in options.items() if k in known})


@dataclass
class Subject:
    """A backend under test.

    Attributes:
        name: See `bench.backends.require`.
        options: Options of a backend of this package.
        reports: Reports of the graphs that were compiled inside of `watching`.
    """

    name: str
    options: dict[str, Any] = field(default_factory=lambda: dict(PROGRAMS))
    reports: list[GraphReport] = field(default_factory=list)

    @property
    def compiler(self) -> Any:
        """As `torch.compile(backend=...)` takes it."""
        return compiler_of(self.name, **self.options)

    def compile(self, function: Any, **settings: Any) -> Any:
        """`torch.compile` with the backend and further settings."""
        return torch.compile(function, backend=self.compiler, **settings)

    @contextlib.contextmanager
    def watching(self) -> Iterator[list[GraphReport]]:
        """Inside, reports of graphs are kept."""
        with record() as reports:
            self.reports = reports
            yield reports

    def check(
        self,
        function: Function,
        *inputs: Any,
        fullgraph: bool = True,
        dynamic: bool | None = None,
    ) -> None:
        """Compares one call with eager: values, dtypes, strides, aliases, and what it mutates.

        Args:
            function: Function or module.
            inputs: Its inputs; each side gets copies.
            fullgraph: Whether Dynamo must capture it whole.
            dynamic: As for `torch.compile`.

        Raises:
            AssertionError: Something is not as eager has it.
        """
        ours, theirs, precise = (copy_inputs(inputs) for _ in range(3))
        compiled = self.compile(function, fullgraph=fullgraph, dynamic=dynamic)
        torch.manual_seed(SEED)
        results = compiled(*ours)
        torch.manual_seed(SEED)
        expected = function(*theirs)
        assert_same(expected, results, reference(function, precise, expected))
        assert_same(theirs, ours, theirs, "input")
        found, wanted = aliases(results, ours), aliases(expected, theirs)
        ensure(found == wanted, f"outputs share memory with {found} instead of {wanted}")

    def why_not_whole(self) -> Counter[str]:
        """Returns what ran in eager, as far as the backend says."""
        found: Counter[str] = Counter()
        for report in self.reports:
            for fallback in report.fallbacks:
                found[f"{fallback.op}: {fallback.reason}"] += 1
            found.update(report.runtime_fallbacks)
        return found


def reference(function: Function, inputs: Sequence[Any], expected: Any) -> Any:
    """Returns the results in float64; eager's own where they are that precise already."""
    if any(t.dtype in (torch.float64, torch.complex128) for t in tensors(expected)):
        return expected
    torch.manual_seed(SEED)
    return widen(function)(*(widen(x) for x in inputs))


def gradients(model: Function, owner: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """Returns the parameters' gradients of the model's loss, see `bench.work.loss`, by name.

    Args:
        model: The module, or what it was compiled to.
        owner: The module.
        inputs: Positional or keyword arguments; not changed.
    """
    owner.zero_grad(set_to_none=True)
    loss(call(model, copy.deepcopy(inputs))).backward()
    return {n: p.grad.clone() for n, p in owner.named_parameters() if p.grad is not None}


def float64_copy(module: nn.Module) -> nn.Module:
    """Returns a deep copy of a module in float64, as a reference."""
    return copy.deepcopy(module).double()
