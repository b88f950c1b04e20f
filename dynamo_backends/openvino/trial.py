"""Asks OpenVINO itself whether it can run a call, and whether its result is eager's.

Each kind of call (operator, shapes, dtypes, other arguments) is compiled as a graph of its own and
run on samples (`verify/trials/samples.py`). So a missing rule, a kernel that fails and one that
means something else are found before a graph depends on them, and each answer has a reason.
Verdicts are kept (`runtime/verdicts.py`). The calls of a graph are tried side by side first
(`verify/trials/merged_trials.py`).
"""

import hashlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import disable_current_modes
from dynamo_backends.graph.call_arguments import collect_tensors
from dynamo_backends.graph.decomposition_tables import has_decomposition
from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface.errors import LoweringError
from dynamo_backends.interface.plan import Support
from dynamo_backends.openvino import exclusions
from dynamo_backends.openvino.compiler import compile_graph
from dynamo_backends.openvino.core_api import CompileSettings
from dynamo_backends.openvino.dtypes import why_dtype_unsupported
from dynamo_backends.openvino.frontend import summarize_error
from dynamo_backends.openvino.wide_integers import (
    UNKNOWN,
    KnownIntegers,
    find_known_inputs,
    has_int64,
    needs_int64_pairs,
)
from dynamo_backends.runtime.verdicts import TrialVerdict, VerdictStore
from dynamo_backends.verify.trials.call_trials import (
    Compile,
    make_decomposing_compile,
    sanitized_samples,
    shrink_call,
    single_call_graph,
    try_call,
    used_result_indices,
    why_untriable,
)
from dynamo_backends.verify.trials.merged_trials import (
    Given,
    Trial,
    make_binding_compiler,
    make_trial,
    run_merged_trials,
)
from dynamo_backends.verify.trials.verdict_keys import verdict_key

_VENDOR = "OpenVINO"
_verdicts = VerdictStore("ov", sources=("openvino", "graph/value_ranges.py"))


def support_by_trial(node: fx.Node, settings: CompileSettings, keep: bool) -> Support:
    """Returns the support of a call; tries it on samples if no verdict is cached."""
    with disable_current_modes(), torch.no_grad():
        known = find_known_inputs(node)
        reason = _untriable(node, known)
        if reason is not None:
            return Support(False, reason)
        find = lambda: _try(node, settings, known)  # noqa: E731
        return _verdicts(_kind(node, settings, known), find, keep).as_support


def try_calls_together(nodes: Iterable[fx.Node], settings: CompileSettings, keep: bool) -> None:
    """Tries many calls in one model, and records verdicts for those that are right.

    Args:
        nodes: Calls.
        settings: How they are compiled.
        keep: Whether verdicts are kept on disk.
    """
    calls: dict[str, _Call] = {}
    with disable_current_modes(), torch.no_grad():
        for node in nodes:
            known = find_known_inputs(node)
            if _untriable(node, known) is None:
                calls[_kind(node, settings, known)] = node, known
    _verdicts.find_in_batch(calls, lambda unknown: _try_all(unknown, settings), keep)


_Call = tuple[fx.Node, KnownIntegers]


def _kind(node: fx.Node, settings: CompileSettings, known: KnownIntegers) -> str:
    bits = [r and tuple(n.bit_length() * (1 if n > 0 else -1) for n in r) for r in known.ranges]
    return f"{settings} {verdict_key(node)} {_described(node, known.values)}{bits or ''}"


def _try_all(calls: Mapping[str, _Call], settings: CompileSettings) -> dict[str, TrialVerdict]:
    """Tries calls merged into one model; returns verdicts for those that are right."""
    right: set[str] = set()
    for is_narrow in (False, True):
        trials: dict[str, Trial] = {}
        for kind, (node, known) in calls.items():
            if (known != UNKNOWN) == is_narrow:
                tried, given = _tried_on(node, known)
                trials[kind] = make_trial(tried, exclusions.sanitize_sample, given)
        right |= run_merged_trials(trials, make_binding_compiler(_compile(settings, is_narrow)))
    return dict.fromkeys(right, TrialVerdict())


def _compile(settings: CompileSettings, is_narrow: bool) -> Compile:
    """Compiles the graph of a trial, which cannot tell that its integers are small."""
    return lambda graph: compile_graph(graph, settings, not is_narrow)


def _untriable(node: fx.Node, known: KnownIntegers) -> str | None:
    """Returns why a call cannot be tried at all; None if it can."""
    reason = exclusions.why_excluded(node) or why_untriable(node, _VENDOR)
    if reason is not None:
        return reason
    for value in _used_tensors(node):
        if value.device.type != "cpu":
            return f"OpenVINO cannot read {value.device.type} memory"
        reason = why_dtype_unsupported(node, value.dtype)
        if reason is not None:
            return reason
        if 0 in value.shape:
            return "OpenVINO does not support empty tensors"
    is_unknown = known == UNKNOWN and any(map(has_int64, node.all_input_nodes))
    if is_unknown and has_int64(node) and not needs_int64_pairs(node):
        return "OpenVINO computes 64-bit integers in 32 bits"
    return None


def _used_tensors(node: fx.Node) -> Iterable[Tensor]:
    """Yields the fake tensors of a call's operands and of its used results."""
    value: Any = node.meta.get("val")
    results = value if isinstance(value, Tensor) else [value[i] for i in used_result_indices(node)]
    return (*(n.meta["val"] for n in node.all_input_nodes), *collect_tensors(results))


def _described(node: fx.Node, values: Sequence[Tensor]) -> str:
    """Hashes known values for the verdict's key; "distinct" for views of such values.

    Where they all differ, a view shows whether each one arrives at its place.
    """
    looks = getattr(node.target, "is_view", False)
    if values and looks and all(v.unique().numel() == v.numel() for v in values):
        return "distinct"
    digest = hashlib.sha256()
    for value in values:
        line = value.clone(memory_format=torch.contiguous_format).view(-1)
        digest.update(line.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16] if values else ""


def _try(node: fx.Node, settings: CompileSettings, known: KnownIntegers) -> TrialVerdict:
    make = _compile(settings, known != UNKNOWN)
    reason = _run(node, make, known)
    if reason is None:
        return TrialVerdict()
    if has_decomposition(node.target):
        checked = make_decomposing_compile(
            lambda graph: make(_checked(graph)), exclusions.nested_decompositions
        )
        if _run(node, checked, known) is None:
            return TrialVerdict(decomposed=True)
    return TrialVerdict(reason)


def _run(node: fx.Node, compile_graph: Compile, known: KnownIntegers) -> str | None:
    """Runs a call alone; returns what is wrong, or None.

    It is run on the values that its inputs are known to have, or on a sample.
    """
    node, given = _tried_on(node, known)
    make = lambda graph: compile_graph(graph).bind(())[0]  # noqa: E731
    return try_call(
        node, make, _VENDOR, summarize_error, exclusions.sanitize_sample, given and given()
    )


def _tried_on(node: fx.Node, known: KnownIntegers) -> tuple[fx.Node, Given | None]:
    """Returns the call to try, perhaps a smaller one, and its inputs; None: samples."""
    if known.values:
        return node, lambda: [list(known.values)]
    if known.ranges:
        return node, lambda: _within(
            sanitized_samples(node, exclusions.sanitize_sample), known.ranges
        )
    if _has_only_floats(single_call_graph(node)):
        return shrink_call(node), None
    # Whatever their size: large integers are computed otherwise.
    return node, lambda: sanitized_samples(node, exclusions.sanitize_sample)


def _within(given: Iterable[list[Any]], ranges: Sequence[Any]) -> Iterable[list[Any]]:
    """Clamps the integers of samples to known ranges."""
    for args in given:
        pairs = zip(args, ranges, strict=True)
        yield [x if bounds is None else x.clamp(*bounds) for x, bounds in pairs]


def _checked(graph: Graph) -> Graph:
    """Returns a decomposition's graph; raises if one of its calls is excluded.

    Raises:
        LoweringError: A call in it is not given to OpenVINO.
    """
    for inner in graph.calls:
        if inner.target is operator.getitem:
            continue
        reason = _untriable(inner, UNKNOWN)
        if reason is not None:
            raise LoweringError(inner.name, str(inner.target), reason)
    return graph


def _has_only_floats(graph: Graph) -> bool:
    values = (n.meta["val"] for n in (*graph.placeholders, *graph.outputs))
    return all(v.dtype.is_floating_point for v in values)
