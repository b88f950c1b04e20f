"""Asks ONNX Runtime itself whether it can run a call, and whether its result is eager's.

Each kind of call (operator, shapes, dtypes, other arguments) is compiled as a graph of its own and
run on samples (`verify/trials/samples.py`). So a missing kernel, a lowering that fails and one that
means something else are found before a graph depends on them, and each answer has a reason.
Verdicts are kept (`runtime/verdicts.py`). The calls of a graph are tried side by side first
(`verify/trials/merged_trials.py`).
"""

from collections.abc import Iterable, Mapping

from torch import fx

from dynamo_backends.graph.call_arguments import collect_call_tensors
from dynamo_backends.graph.decomposition_tables import has_decomposition
from dynamo_backends.onnx import exporter_lowerings
from dynamo_backends.onnx.dtypes import DTYPES
from dynamo_backends.ort.session import plain_message
from dynamo_backends.runtime.verdicts import TrialVerdict, VerdictStore
from dynamo_backends.verify.trials.call_trials import (
    Compile,
    make_decomposing_compile,
    shrink_call,
    try_call,
    why_untriable,
)
from dynamo_backends.verify.trials.merged_trials import (
    Trial,
    make_binding_compiler,
    make_decomposing_binder,
    make_trial,
    run_merged_trials,
)
from dynamo_backends.verify.trials.verdict_keys import verdict_key

_VENDOR = "ONNX Runtime"

_verdicts = VerdictStore("onnxrt", sources=("onnx", "ort"))


def find_verdict(
    node: fx.Node, compile_graph: Compile, settings: object, keep: bool
) -> TrialVerdict:
    """Returns a call's verdict: the stored one, or else that of a trial.

    Args:
        node: The call.
        compile_graph: Makes an executable of a graph.
        settings: What `compile_graph` depends on.
        keep: Whether verdicts are kept on disk.
    """
    reason = _untriable(node)
    if reason is not None:
        return TrialVerdict(reason)
    kind = f"{settings} {verdict_key(node)}"
    return _verdicts(kind, lambda: _try(shrink_call(node), compile_graph), keep)


def try_together(
    nodes: Iterable[fx.Node], compile_graph: Compile, settings: object, keep: bool
) -> None:
    """Tries calls merged in few graphs; stores verdicts of those that are right.

    Args:
        nodes: Calls.
        compile_graph: Makes an executable of a graph.
        settings: What `compile_graph` depends on.
        keep: Whether verdicts are kept on disk.
    """
    calls = {f"{settings} {verdict_key(n)}": n for n in nodes if _untriable(n) is None}
    _verdicts.find_in_batch(calls, lambda unknown: _try_all(unknown, compile_graph), keep)


def _try_all(calls: Mapping[str, fx.Node], compile_graph: Compile) -> dict[str, TrialVerdict]:
    """Verdicts on those calls that are right as they are, or decomposed if they must be."""
    native: dict[str, Trial] = {}
    decomposed: dict[str, Trial] = {}
    for kind, node in calls.items():
        trials = native if exporter_lowerings.why_call_not_lowered(node) is None else decomposed
        trials[kind] = make_trial(shrink_call(node), exporter_lowerings.sanitize_sample)
    found = dict.fromkeys(
        run_merged_trials(native, make_binding_compiler(compile_graph)), TrialVerdict()
    )
    make = make_decomposing_binder(compile_graph, exporter_lowerings.nested_decompositions)
    return found | dict.fromkeys(run_merged_trials(decomposed, make), TrialVerdict(decomposed=True))


def _untriable(node: fx.Node) -> str | None:
    """Returns why a call cannot even be tried on ONNX Runtime; None if it can."""
    reason = exporter_lowerings.why_call_not_lowered(node)
    if reason is not None and not has_decomposition(node.target):
        return reason
    for value in collect_call_tensors(node):
        if value.dtype not in DTYPES:
            return f"ONNX Runtime does not compute with {value.dtype}"
    return why_untriable(node, _VENDOR)


def _try(node: fx.Node, compile_graph: Compile) -> TrialVerdict:
    reason = exporter_lowerings.why_call_not_lowered(node)
    if reason is None:
        reason = _run(node, compile_graph)
        if reason is None:
            return TrialVerdict()
    if (
        has_decomposition(node.target)
        and _run(
            node, make_decomposing_compile(compile_graph, exporter_lowerings.nested_decompositions)
        )
        is None
    ):
        return TrialVerdict(decomposed=True)
    return TrialVerdict(reason)


def _run(node: fx.Node, compile_graph: Compile) -> str | None:
    """Compiles and runs a call alone; returns what is wrong, or None."""
    make = lambda graph: compile_graph(graph).bind(())[0]  # noqa: E731
    return try_call(node, make, _VENDOR, plain_message, exporter_lowerings.sanitize_sample)
