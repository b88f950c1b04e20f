"""Asks IREE itself whether it can run a call, and whether its result is eager's.

Each kind of call (operator, shapes, dtypes, arguments) is compiled as a function of its own and run
on samples (`verify/trials/samples.py`). So a missing lowering, one that the compiler breaks down on
and one that means something else are found before a graph depends on them, and each answer has a
reason. Verdicts are kept (`runtime/verdicts.py`).

Starting the compiler takes longer than compiling a function. So when one call of a graph is asked
about, all calls of that graph are tried beside it, many functions in one program.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import OpOverload, disable_current_modes
from dynamo_backends._torch_private.forks import fork_safe_rlock
from dynamo_backends.graph.call_arguments import collect_call_tensors, collect_tensors
from dynamo_backends.graph.decomposition_tables import has_decomposition, nested_decomposition_table
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.planned_decomposition import compile_decomposed
from dynamo_backends.interface.errors import CompileError, LoweringError, first_line
from dynamo_backends.iree import exclusions
from dynamo_backends.iree.compiler import Settings, compile_program
from dynamo_backends.iree.importer import DTYPES, translate
from dynamo_backends.iree.lowering import ENTRY, LoweredIree, lower, refusal
from dynamo_backends.iree.runtime import IreeExecutable
from dynamo_backends.iree.session import open_device
from dynamo_backends.runtime.verdicts import TrialVerdict, VerdictStore
from dynamo_backends.verify.trials.call_trials import (
    is_run_in_trial,
    judge_on_samples,
    shrink_call,
    single_call_graph,
    used_result_indices,
    why_untriable,
)
from dynamo_backends.verify.trials.samples import make_samples, without_infinities
from dynamo_backends.verify.trials.verdict_keys import verdict_key

TOGETHER = 24
"""So many functions are compiled in one program."""

_VENDOR = "IREE"
_verdicts = VerdictStore("iree", sources=("iree",))
_lock = fork_safe_rlock()


@dataclass(frozen=True)
class _Trial:
    """A call to be tried.

    Attributes:
        kind: What the verdict depends on.
        node: The call.
        graph: The call alone, as it was.
        lowered: As a function.
        decomposed: It was decomposed.
    """

    kind: str
    node: fx.Node
    graph: Graph
    lowered: LoweredIree
    decomposed: bool


def verdict(
    node: fx.Node, settings: Settings, keep: bool, beside: Iterable[fx.Node] = ()
) -> TrialVerdict:
    """Returns what is known about a call, after trials if need be.

    Args:
        node: The call.
        settings: How it is compiled.
        keep: Whether verdicts are kept on disk.
        beside: Calls that are tried together with it.
    """
    reason = _untriable(node)
    if reason is not None:
        return TrialVerdict(reason)
    kind = _kind(node, settings)
    with _lock:
        known = _verdicts.get(kind, keep)
        if known is None:
            calls = dict(_undecided((node, *beside), settings, keep))
            with disable_current_modes(), torch.no_grad():
                found = _try_all(calls, settings)
            for each, outcome in found.items():
                _verdicts.put(each, outcome, keep)
            known = found[kind]
        return known


def _undecided(
    calls: Iterable[fx.Node], settings: Settings, keep: bool
) -> Iterator[tuple[str, fx.Node]]:
    """Returns those calls on which there is no verdict, one of each kind."""
    seen: set[str] = set()
    for call in calls:
        if _untriable(call) is None and (kind := _kind(call, settings)) not in seen:
            seen.add(kind)
            if _verdicts.get(kind, keep) is None:
                yield kind, shrink_call(call)


def _kind(node: fx.Node, settings: Settings) -> str:
    """Returns the key of the verdict on a call."""
    return f"{settings} {verdict_key(node)}"


def _untriable(node: fx.Node) -> str | None:
    """Returns why a call cannot even be tried; None if it can."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return "it is not an ATen operator"
    if exclusions.is_random(node):
        return "it draws random numbers"
    reason = why_untriable(node, _VENDOR)
    if reason is not None:
        return reason
    for value in collect_call_tensors(node):
        if value.device.type != "cpu":
            return f"the tensor is in {value.device.type} memory"
        if value.dtype not in DTYPES:
            return f"IREE does not compute with {value.dtype}"
    if not collect_tensors(node.meta.get("val")):
        return "it has no tensor result"
    if not isinstance(node.meta["val"], Tensor) and not used_result_indices(node):
        return "none of its results is used"
    if exclusions.why_not(node) is not None and not has_decomposition(node.target):
        return exclusions.why_not(node)
    return None


Found = dict[str, TrialVerdict]
"""Verdicts by kind."""


def _try_all(calls: Mapping[str, fx.Node], settings: Settings) -> Found:
    """Finds verdicts on calls: as they are, and on those that fail so, decomposed."""
    found: Found = {}
    _try_as(calls, settings, False, found)
    again = {
        kind: node
        for kind, node in calls.items()
        if found[kind].reason and has_decomposition(node.target)
    }
    _try_as(again, settings, True, found)
    return found


def _try_as(
    calls: Mapping[str, fx.Node], settings: Settings, decomposed: bool, found: Found
) -> None:
    trials = []
    for i, (kind, node) in enumerate(calls.items()):
        reason = exclusions.why_not(node) if not decomposed else None
        try:
            if reason is None:
                name = ENTRY if len(calls) == 1 else f"trial{i}"
                trials.append(_prepare(kind, node, name, decomposed))
        except LoweringError as error:
            reason = error.reason
        except MemoryError:  # says nothing about the call
            raise
        except Exception as error:  # of the importer; none may reach the user
            reason = refusal(error)
        if reason is not None:
            _decide(kind, reason, decomposed, found)
    for start in range(0, len(trials), TOGETHER):
        _try_together(trials[start : start + TOGETHER], settings, found)


def _prepare(kind: str, node: fx.Node, name: str, decomposed: bool) -> _Trial:
    """Returns a call as a function that the importer can translate; raises if it cannot."""
    graph = single_call_graph(node)
    names = [graph.calls[0].name] if decomposed else []
    inside = nested_decomposition_table((), exclusions.DECOMPOSED)
    lowered = compile_decomposed(graph, names, inside, lambda copy: lower(copy, name))
    if decomposed:
        _check_inside(lowered)
    translate([lowered.function])
    return _Trial(kind, node, graph, lowered, decomposed)


def _check_inside(lowered: LoweredIree) -> None:
    """Raises if what a call was decomposed into has calls that are not given to IREE."""
    for inner in lowered.function.graph.nodes:
        reason = exclusions.why_not(inner) if isinstance(inner.target, OpOverload) else None
        if reason is not None:
            raise LoweringError(inner.name, str(inner.target), f"{inner.target}: {reason}")


def _decide(kind: str, reason: str | None, decomposed: bool, found: Found) -> None:
    """Notes a verdict; of two refusals the first."""
    if reason is None:
        found[kind] = TrialVerdict(decomposed=decomposed)
    elif not decomposed:
        found[kind] = TrialVerdict(reason)


def _try_together(trials: Sequence[_Trial], settings: Settings, found: Found) -> None:
    """Compiles calls in one program, or, if that fails, in two halves."""
    try:
        module = translate([t.lowered.function for t in trials])
        program = compile_program(module, settings)
    except CompileError as error:
        if len(trials) == 1:
            _decide(trials[0].kind, str(error), trials[0].decomposed, found)
            return
        middle = len(trials) // 2
        for half in (trials[:middle], trials[middle:]):
            _try_together(half, settings, found)
        return
    for trial in trials:
        _decide(trial.kind, _run(trial, program), trial.decomposed, found)


def _run(trial: _Trial, program: bytes) -> str | None:
    """Returns what is wrong with a compiled call; None if nothing is."""
    lowered = trial.lowered
    try:
        executable = IreeExecutable(
            trial.graph, program, lowered.wiring, open_device(1), lowered.function.name
        )
        run = executable.bind(())[0]
    except MemoryError:
        raise
    except Exception as error:
        return f"IREE cannot load it: {_plain(error)}"
    if not is_run_in_trial(trial.node):
        return None
    given = (_adapted(trial.node, args) for args in make_samples(trial.node))
    return judge_on_samples(trial.graph, run, given, _VENDOR, _plain)


def _adapted(node: fx.Node, args: list[Tensor]) -> list[Tensor]:
    """Inputs of a trial, with sums of products as large as networks have them: about 1.

    The accuracy rule knows no other scale.
    """
    if exclusions.is_unsettled_at_infinity(node):
        args = list(map(without_infinities, args))
    product = exclusions.right_operand(node)
    if product is not None and args[0].dtype.is_floating_point:
        operand, count = product
        factors = args[node.all_input_nodes.index(operand)]
        once = tuple(slice(None if stride else 1) for stride in factors.stride())
        factors[once] *= max(count, 1) ** -0.5  # torch refuses to write to expanded tensors
    return args


def _plain(error: BaseException) -> str:
    """Returns the first line of one of the runtime's messages, without places in its source."""
    return re.sub(r"^.*?\.c:\d+: ", "", first_line(error))
