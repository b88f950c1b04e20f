"""A module of a linked program (see `linking`), and what the manifest has of it."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface import report as reporting
from dynamo_backends.interface.backend import Backend
from dynamo_backends.interface.errors import suppress_and_log
from dynamo_backends.interface.executable import Executable
from dynamo_backends.interface.report import (
    Compilation,
    Fallback,
    GraphReport,
    InputReport,
    PartReport,
    isolate_trial_reports,
    to_json_types,
)
from dynamo_backends.package import calls, linking
from dynamo_backends.package.assembling import Contents, assembled
from dynamo_backends.package.inputs import Arguments
from dynamo_backends.package.module import PackagedModule
from dynamo_backends.package.packaged import InMemoryParts, PackageBackend
from dynamo_backends.package.portable import Portable
from dynamo_backends.package.spec import Spec
from dynamo_backends.package.structure import decoded, encoded
from dynamo_backends.runtime.index_checks import wrap_raise_on_flag, wrap_with_bounds_checks
from dynamo_backends.verify.comparator import describe_difference
from dynamo_backends.verify.reference import (
    module_in_float64,
    restore_rng,
    snapshot_rng,
    widen_to_float64,
)

_COUNTS = ("ops_on_backend", "ops_in_eager", "blocks")
_LISTS = {"inputs": InputReport, "parts": PartReport, "fallbacks": Fallback}


def make_program_record(
    contents: Contents,
    portable: Portable,
    weights: Sequence[Tensor],
    backend: PackageBackend | None,
    is_right: Callable[[PackagedModule], bool],
) -> dict[str, Any] | None:
    """Loads and calls the executables once; returns the manifest's record of them.

    Args:
        contents: What the package says.
        portable: The graph.
        weights: Its first inputs.
        backend: Has the executables.
        is_right: Calls a module, and says whether results are right.

    Returns:
        None: its sizes vary, or it has something that has no form there.
    """
    if backend is None or not backend.kept.parts or None in map(_leaf, portable.leaves):
        return None
    kept = _Noting(backend.inner, InMemoryParts(backend.kept.parts), backend.plans, is_sealed=True)
    with isolate_trial_reports():
        module = assembled(contents, portable, weights, kept)
        found = described(module, kept, str(contents.parsed(kept).verify))
        if found is None:
            return None
        trial = linked(found, contents, lambda: portable, weights, kept, ())
        return found if is_right(trial) and not trial.reports[0].events else None


class _Noting(PackageBackend):
    """A package's backend that notes which parts executables are loaded from."""

    def load(self, parts: Mapping[str, bytes], graph: Graph, options: Any) -> Executable:
        """See `SavesExecutables.load`."""
        made = super().load(parts, graph, options)
        for mark, saved in self.kept.parts.items():
            if saved is parts:
                self._loaded.append((made, mark))
        return made

    @functools.cached_property
    def _loaded(self) -> list[tuple[Executable, str]]:
        return []

    def mark_of(self, executable: Executable) -> str | None:
        """Returns the key of the parts that an executable was loaded from; None: of none."""
        return next((mark for made, mark in self._loaded if made is executable), None)


def described(module: PackagedModule, backend: _Noting, verify: str) -> dict[str, Any] | None:
    """Returns what the manifest has of a module's program.

    Args:
        module: As `load` makes it of the package's executables.
        backend: What has loaded them.
        verify: The option; with "always" every call needs the graph.

    Returns:
        None: its sizes vary, or it has something that has no form there.
    """
    (report,), portable = module.reports, module.portable
    leaves = [_leaf(leaf) for leaf in portable.leaves]
    program = getattr(report.executable, "static_program", None)
    if program is None or None in leaves or verify == "always" or report.reverted:
        return None
    made = linking.to_dict(program, backend.mark_of)
    checks = calls.checks_to_dict(getattr(report.executable, "checks", None))
    if made is None or checks is None:
        return None
    places = portable.places[: len(portable.weights)]
    weights = [[n, Spec.of(p.meta["val"]).to_dict()]
               for n, p in zip(portable.weights, places, strict=True)]  # fmt: skip
    said = {name: to_json_types(getattr(report, name)) for name in (*_COUNTS, *_LISTS)}
    shapes = report.compilations[0].shapes
    return {
        "program": made, "checks": checks, "weights": weights, "leaves": leaves,
        "given": portable.given,
        "report": {**said, "shapes": shapes},
    }  # fmt: skip


def weight_specs(record: Mapping[str, Any]) -> list[tuple[str, Spec]]:
    """Returns the name and the tensor spec of each weight, in order."""
    return [(name, Spec.from_dict(spec)) for name, spec in record["weights"]]


def linked(
    record: Mapping[str, Any],
    contents: Contents,
    portable: Callable[[], Portable],
    weights: Sequence[Tensor],
    backend: PackageBackend,
    notes: Sequence[str],
) -> PackagedModule:
    """Returns a module that runs a linked program.

    Args:
        record: From `described`.
        contents: What the package says.
        portable: Makes the graph, which runs where compiled code fails.
        weights: Its first inputs.
        backend: Has the executables.
        notes: For `explain`.
    """
    start = time.perf_counter()
    report = _reported(record["report"], backend)
    options = contents.parsed(backend)
    in_eager = lambda values: portable().in_eager(values)  # noqa: E731
    run = linking.linked(
        record["program"],
        weights,
        lambda mark, graph: backend.load(backend.kept.parts[mark], graph, options),
        options,
        report,
        in_eager,
    )
    before, flag = calls.checks_from_dict(record["checks"])
    run = wrap_with_bounds_checks(wrap_raise_on_flag(run, flag), before, flag, in_eager)
    made = len({part["mark"] for part in record["program"]["parts"] if "mark" in part})
    seconds = time.perf_counter() - start
    report.note_compilation(Compilation(tuple(record["report"]["shapes"]), made, made, seconds))
    report.executables = report.cache_hits = made
    report.log_fallbacks()
    with suppress_and_log(
        report, "publishing a report"
    ):  # not in torch's logs: it was not compiled
        reporting.send_to_recorders(report)
    leaves = [_placed(leaf) for leaf in record["leaves"]]
    call = Arguments(contents.names, contents.arguments, leaves, record["given"])
    return PackagedModule(
        contents.name, backend.name, portable, weights, call, contents.results, run, [report], notes
    )


def agree(module: PackagedModule, call: Any, linked: PackagedModule) -> bool:
    """Returns whether a linked module's results are as accurate as those of the portable form.

    Args:
        module: Module of the portable form.
        call: Arguments.
        linked: The module in question.
    """
    return difference_from_eager(module, call, linked) is None


def difference_from_eager(module: PackagedModule, call: Any, run: Callable[..., Any]) -> str | None:
    """Returns how results differ from those of the portable form; None if they do not.

    Args:
        module: The module.
        call: Arguments.
        run: Computes the results of the call.
    """
    args, kwargs = call
    state = snapshot_rng()
    results = pytree.tree_leaves(run(*args, **kwargs))
    restore_rng(state)
    expected = pytree.tree_leaves(module.in_eager(*args, **kwargs))

    def precise() -> Sequence[Any]:
        restore_rng(state)
        wide = module_in_float64(module.portable.module)
        with torch.no_grad():
            computed: Sequence[Any] = wide(*map(widen_to_float64, module.values(args, kwargs)))
        return computed

    return describe_difference(expected, results, precise)


def _reported(said: Mapping[str, Any], backend: Backend) -> GraphReport:
    report = GraphReport(backend.name, "inference")
    for name in _COUNTS:
        setattr(report, name, said[name])
    for name, kind in _LISTS.items():
        made: Any = kind
        entries = [{k: tuple(v) if isinstance(v, list) else v for k, v in each.items()}
                   for each in said[name]]  # fmt: skip
        setattr(report, name, tuple(made(**entry) for entry in entries))
    return report


def _leaf(leaf: Any) -> dict[str, Any] | None:
    if isinstance(leaf, Tensor):
        is_static = all(type(n) is int for n in (*leaf.shape, *leaf.stride()))
        return {"tensor": Spec.of(leaf).to_dict()} if is_static else None
    if isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool):
        return None
    return {"constant": encoded(leaf, "arguments")}


def _placed(leaf: Mapping[str, Any]) -> Any:
    if "tensor" in leaf:
        return Spec.from_dict(leaf["tensor"]).empty()
    return decoded(leaf["constant"])
