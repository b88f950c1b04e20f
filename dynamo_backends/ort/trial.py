"""Asks ONNX Runtime itself whether it can run a call, and whether its result is eager's.

Each kind of call (operator, shapes, dtypes, other arguments) is compiled as a graph of its own and
run on samples (`verify/trials/samples.py`). So a missing kernel, a lowering that fails and one that
means something else are found before a graph depends on them, and each answer has a reason.
Verdicts are kept (`runtime/verdicts.py`). The calls of a graph are tried side by side first
(`verify/trials/merged_trials.py`).
"""

from collections.abc import Iterable, Mapping

from torch import fx

from dynamo_backends.graph.calls import call_tensors
from dynamo_backends.graph.decompositions import has_decomposition
from dynamo_backends.onnx import exporter_lowerings
from dynamo_backends.onnx.dtypes import DTYPES
from dynamo_backends.ort.session import plain_message
from dynamo_backends.runtime.verdicts import Verdict, Verdicts
from dynamo_backends.verify.trials.kinds import kind_of
from dynamo_backends.verify.trials.merged_trials import (
    Trial,
    bound_decomposed,
    make_binding_compiler,
    right_together,
    trial_of,
)
from dynamo_backends.verify.trials.trials import (
    Compile,
    make_decomposing_compile,
    not_plain,
    smaller,
    try_call,
)

_VENDOR = "ONNX Runtime"

_verdicts = Verdicts("onnxrt", sources=("onnx", "ort"))


def verdict(node: fx.Node, compile_graph: Compile, settings: object, keep: bool) -> Verdict:
    """Returns a call's verdict: the stored one, or else that of a trial.

    Args:
        node: The call.
        compile_graph: Makes an executable of a graph.
        settings: What `compile_graph` depends on.
        keep: Whether verdicts are kept on disk.
    """
    reason = _untriable(node)
    if reason is not None:
        return Verdict(reason)
    kind = f"{settings} {kind_of(node)}"
    return _verdicts(kind, lambda: _try(smaller(node), compile_graph), keep)


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
    calls = {f"{settings} {kind_of(n)}": n for n in nodes if _untriable(n) is None}
    _verdicts.beforehand(calls, lambda unknown: _try_all(unknown, compile_graph), keep)


def _try_all(calls: Mapping[str, fx.Node], compile_graph: Compile) -> dict[str, Verdict]:
    """Verdicts on those calls that are right as they are, or decomposed if they must be."""
    native: dict[str, Trial] = {}
    decomposed: dict[str, Trial] = {}
    for kind, node in calls.items():
        trials = native if exporter_lowerings.why_not_call(node) is None else decomposed
        trials[kind] = trial_of(smaller(node), exporter_lowerings.spared)
    found = dict.fromkeys(right_together(native, make_binding_compiler(compile_graph)), Verdict())
    make = bound_decomposed(compile_graph, exporter_lowerings.inner_rules)
    return found | dict.fromkeys(right_together(decomposed, make), Verdict(decomposed=True))


def _untriable(node: fx.Node) -> str | None:
    """Returns why a call cannot even be tried on ONNX Runtime; None if it can."""
    reason = exporter_lowerings.why_not_call(node)
    if reason is not None and not has_decomposition(node.target):
        return reason
    for value in call_tensors(node):
        if value.dtype not in DTYPES:
            return f"ONNX Runtime does not compute with {value.dtype}"
    return not_plain(node, _VENDOR)


def _try(node: fx.Node, compile_graph: Compile) -> Verdict:
    reason = exporter_lowerings.why_not_call(node)
    if reason is None:
        reason = _run(node, compile_graph)
        if reason is None:
            return Verdict()
    if (
        has_decomposition(node.target)
        and _run(node, make_decomposing_compile(compile_graph, exporter_lowerings.inner_rules))
        is None
    ):
        return Verdict(decomposed=True)
    return Verdict(reason)


def _run(node: fx.Node, compile_graph: Compile) -> str | None:
    """Compiles and runs a call alone; returns what is wrong, or None."""
    make = lambda graph: compile_graph(graph).bind(())[0]  # noqa: E731
    return try_call(node, make, _VENDOR, plain_message, exporter_lowerings.spared)
