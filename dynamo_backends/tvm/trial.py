"""Asks TVM itself whether it can run a call, and whether its result is eager's.

Each kind of call (operator, shapes, dtypes, other arguments) is compiled as a graph of its own and
run on samples (`verify/trials/samples.py`). So a missing conversion, a program that cannot be
generated and one that means something else are found before a graph depends on them, and each
answer has a reason.
"""

from torch import fx

from dynamo_backends.graph.call_arguments import collect_call_tensors
from dynamo_backends.interface.plan import Support
from dynamo_backends.runtime.verdicts import TrialVerdict, VerdictStore
from dynamo_backends.tvm import exclusions
from dynamo_backends.tvm.compiler import compile_graph
from dynamo_backends.tvm.converters import is_convertible
from dynamo_backends.tvm.dtypes import DTYPES
from dynamo_backends.tvm.lowering import plain_message
from dynamo_backends.tvm.session import Settings
from dynamo_backends.verify.trials.call_trials import shrink_call, try_call, why_untriable
from dynamo_backends.verify.trials.verdict_keys import verdict_key

_VENDOR = "TVM"
_SETTINGS = Settings(num_threads=1, uses_records=False)  # trials are small
_verdicts = VerdictStore("tvm", sources=("tvm",))


def supports(node: fx.Node, keep: bool) -> Support:
    """Returns the verdict on a call, after a trial if necessary; `keep`: keep it on disk."""
    reason = _untriable(node)
    if reason is not None:
        return Support(False, reason)
    return _verdicts(verdict_key(node), lambda: _try(shrink_call(node)), keep).as_support


def _untriable(node: fx.Node) -> str | None:
    """Returns why a call cannot even be tried; None if it can."""
    if not is_convertible(node.target):
        return "TVM's importer has no conversion of it"
    reason = exclusions.why_not(node) or why_untriable(node, _VENDOR)
    if reason is not None:
        return reason
    for value in collect_call_tensors(node):
        if value.device.type != "cpu":
            return (
                f"this backend compiles TVM programs for the CPU only, not for {value.device.type}"
            )
        if value.dtype not in DTYPES:
            return f"TVM does not compute with {value.dtype}"
    return None


def _try(node: fx.Node) -> TrialVerdict:
    make = lambda graph: compile_graph(graph, _SETTINGS).bind(())[0]  # noqa: E731
    return TrialVerdict(try_call(node, make, _VENDOR, plain_message) or "")
