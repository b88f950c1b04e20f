"""Has a graph tuned in another process, and lets the winner take over the calls.

`tune_in_background` is called by Dynamo. All that follows is done by the thread of
`pipeline.background`, which lets calls go first. A winner is compared with eager on copies there
and not in a call, which would take the time of both.
"""

import dataclasses
import logging
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dynamo_backends import _torch_private as private
from dynamo_backends.autotune import serialization, tuning_thread
from dynamo_backends.autotune.background_graph import BackgroundTunedGraph
from dynamo_backends.autotune.candidates import Candidate
from dynamo_backends.autotune.graph_budget import GraphBudget
from dynamo_backends.autotune.isolation import is_isolated
from dynamo_backends.autotune.options import EAGER
from dynamo_backends.autotune.session import SessionOutcome, why_failed
from dynamo_backends.autotune.symbolic_sizes import exact_size_bounds, has_symbols
from dynamo_backends.autotune.trial_inputs import TrialInputs, clone_inputs
from dynamo_backends.autotune.tuner import GraphTuner, TuningResult, UnusableWinnerError
from dynamo_backends.autotune.tuning_subjects import CapturedGraphSubject
from dynamo_backends.autotune.tuning_thread import TuningFailedError, TuningJob
from dynamo_backends.autotune.verification import VerificationCase, verify_on_cases
from dynamo_backends.graph.seeded_draws import GlobalRngError
from dynamo_backends.interface.errors import brief_error
from dynamo_backends.interface.publishing import publish
from dynamo_backends.interface.registry import get_backend, is_loadable_by_name
from dynamo_backends.interface.report import CandidateReport, to_json_types
from dynamo_backends.pipeline import background
from dynamo_backends.workers.progress import COUNTS
from dynamo_backends.workers.race import Run

log = logging.getLogger("dynamo_backends")

_LOCAL = (
    "not tried: the backend is registered in this process only, and tuning runs in another process"
)

_SPENT = "the remaining budget of {:g} s is too short for any candidate; raise the option budget_s"

_COMPARISONS = 3  # while weights change


def tune_in_background(subject: CapturedGraphSubject) -> Callable[..., Any]:
    """Starts tuning a captured graph in the background; returns what runs it meanwhile.

    Args:
        subject: The graph.
    """
    owner = BackgroundTunedGraph(subject, _unsuitable(subject))
    publish(owner.report)
    if owner.subject is None:
        return owner
    try:
        at_once = subject.options.first_call_s and owner.symbols is None
        if at_once and _serves_at_once(owner):
            return owner
    except GlobalRngError as error:
        owner.stop_tuning(str(error))
        return owner
    if not background.submit_compilation("begin", _begin, owner=owner):
        owner.stop_tuning("too many graphs were captured at the same time")
    return owner


def _unsuitable(subject: CapturedGraphSubject) -> str:
    """Returns why a graph is not tuned in the background; empty if it is."""
    of_one_size = not has_symbols(subject.captured)
    if subject.kind == "training" and of_one_size and not subject.options.cache:
        return (
            "decisions for forward and backward graphs are exchanged through the disk cache, which "
            "cache=False disables"
        )
    if any(isinstance(x, torch.SymFloat | torch.SymBool) for x in subject.example_inputs):
        return "an input is a SymFloat or SymBool, which only mode='wait' supports"
    if any(x is None for x in subject.values):
        return (
            "a symbolic size has no concrete value, so its inputs cannot be copied to the tuning "
            "process"
        )
    if subject.devices not in ([], ["cpu"]):
        return (
            "its tensors are not on the CPU, and copying them to the tuning process would double "
            "the device memory"
        )
    kinds = {type(x) for x in subject.values if isinstance(x, Tensor)}
    if others := kinds - {Tensor, nn.Parameter, nn.Buffer}:
        return (
            f"an input is a {min(kind.__name__ for kind in others)}, which cannot be copied to the "
            "tuning process"
        )
    return ""


def _serves_at_once(owner: BackgroundTunedGraph) -> bool:
    """Compiles in the first call who promises most, if that takes no time; True: it is settled."""
    with owner.context() as subject:
        tuner, options, model = GraphTuner(subject), subject.options, subject.key.make_cost_model()
        known = tuner.find_decision()
        if known is None and subject.kind == "training":  # two graphs would be tuned in the call
            return False
        if known is None:
            names = [candidate.name for candidate in subject.competing]
            name = next(iter(model.rank_candidates(names, options.first_call_s)), EAGER)
            result = TuningResult(name, (CandidateReport(name),))
        else:
            name, result = known.winner, known
        compiled_s = {row.name: row.compile_s for row in result.candidates}.get(name)
        expected = compiled_s or model.predict(name).compile_s
        if name == EAGER or expected > options.first_call_s:
            return False
        owner.probe_side_effects()
        candidate = tuner.candidate_named(name)
        try:
            COUNTS.add(compiled=1)
            run = subject.compile_candidate(candidate)
            verdict = verify_on_cases(
                subject.make_workload().make_cases(), run, candidate.is_bfloat16
            )
            if verdict.wrong or why_failed(subject.reports[name]):
                return False
        except Exception as error:
            log.debug("%s cannot run the first call: %s", name, brief_error(error))
            return False
        if known is None:
            owner.switch_to_candidate(name, result, tuner)
            return False
    owner.finish_with_winner(name, result, tuner)
    return True


# In the thread of `pipeline.background`.


def _begin(owner: BackgroundTunedGraph) -> None:
    """Lets the winner of an earlier decision take over, or has the graph tuned."""
    try:
        with owner.context() as subject:
            owner.probe_side_effects()
            tuner = GraphTuner(subject)
            result = tuner.find_decision()
        if result is not None:
            problem = _take_over(owner, tuner, result)
            if not problem:
                return
            log.warning("autotune tunes this graph again: %s %s", result.winner, problem)
        tuning_thread.enqueue_job(_task(owner, tuner))
    except Exception as error:
        log.debug("tuning in the background failed", exc_info=True)
        owner.stop_tuning(str(error) if isinstance(error, GlobalRngError) else brief_error(error))


def _task(owner: BackgroundTunedGraph, tuner: GraphTuner) -> TuningJob:
    """Returns a graph as it is tuned by another process; it does not keep its owner alive."""
    subject = tuner.subject
    assert isinstance(subject, CapturedGraphSubject)

    def prepare(owner: BackgroundTunedGraph, folder: Path) -> dict[str, Any]:
        with owner.context():
            in_any_case = list(subject.apply_warm_start())
        share = GraphBudget(tuner.budget, in_any_case=in_any_case)
        if untried := tuner.rows_if_none_affordable(share, tuner.make_cost_model()):
            owner.report.candidates = untried
            raise TuningFailedError(_SPENT.format(tuner.budget.total_s))
        first = {"first": list(subject.first), "in_any_case": in_any_case}
        return {**_request(owner, folder), **first}

    def leads(owner: BackgroundTunedGraph, name: str) -> None:
        job = lambda owner: _serve_meanwhile(owner, tuner, name)  # noqa: E731
        background.submit_compilation(("leads", name), job, owner=owner)

    def decided(owner: BackgroundTunedGraph, outcome: SessionOutcome) -> None:
        result = tuner.store_outcome(outcome, subject.mutated_positions())
        if not outcome.tried_any:
            owner.stop_tuning(_SPENT.format(tuner.budget.total_s), result.candidates)
            return
        sizes = str(owner.symbols.traffic) if owner.symbols is not None else ""
        if problem := _take_over(owner, tuner, result, sizes):
            owner.stop_tuning(f"{result.winner} was verified while tuning, but {problem}")

    options = subject.options
    return TuningJob(
        owner=weakref.ref(owner),
        followed=owner.followed,
        budget=tuner.budget,
        prepare=prepare,
        leads=leads,
        is_ready=lambda owner: owner.symbols is None or owner.symbols.traffic.has_enough_calls,
        decided=decided,
        left=BackgroundTunedGraph.stop_tuning,
        isolated=[c.name for c in subject.competing if is_isolated(c, options)],
        timeout_s=options.trial_timeout_s,
    )


def _request(owner: BackgroundTunedGraph, folder: Path) -> dict[str, Any]:
    """Writes a graph and its inputs for the other process; returns the request."""
    with owner.context() as subject:
        static, symbols = subject.static_positions, owner.symbols
        serialization.write(folder, subject.captured, subject.values)
        counts: list[int] = []
        if symbols is not None:
            symbols.traffic.stop_recording()
            sets, counts = zip(*symbols.traffic.inputs_by_size(), strict=True)
            serialization.write_other_inputs(folder, sets[1:], static)
        options = dataclasses.replace(subject.options, mode="wait", isolate="off")
        return {
            "known": [
                to_json_types(CandidateReport(c.name, _LOCAL))
                for c in subject.competing
                if _is_local(c)
            ],
            "candidates": [
                dataclasses.asdict(dataclasses.replace(c, made=None)) for c in subject.competing
            ],
            "training": subject.kind == "training",
            "options": dataclasses.asdict(options),
            "static": sorted(static),
            "symbols": dataclasses.asdict(symbols.description) if symbols is not None else {},
            "counts": counts,
            "number": subject.number,
            "settings": serialization.collect_settings(owner.autocast),
        }


def _is_local(candidate: Candidate) -> bool:
    """Returns whether no other process has the candidate."""
    if candidate.made is not None:  # "split", in which backends compete there
        return False
    return candidate.owner == "ours" and not is_loadable_by_name(get_backend(candidate.backend))


def _serve_meanwhile(owner: BackgroundTunedGraph, tuner: GraphTuner, name: str) -> None:
    """Has a candidate run the calls until tuning has ended, unless another one does already."""
    if owner.subject is None or owner.served_by != EAGER:
        return
    try:
        COUNTS.add(compiled=1)
        _load(owner, tuner.candidate_named(name))
    except Exception as error:
        text = (
            str(error)
            if isinstance(error, UnusableWinnerError)
            else f"failed: {brief_error(error)}"
        )
        log.info("autotune: %s does not run calls while tuning continues: it %s", name, text)
        return
    owner.switch_to_candidate(name, TuningResult(name, (CandidateReport(name),)), tuner)
    owner.followed.update_status(meanwhile=name)


def _take_over(
    owner: BackgroundTunedGraph, tuner: GraphTuner, result: TuningResult, sizes: str = ""
) -> str:
    """Loads the winner, compares it with eager, and has it run the calls.

    Args:
        owner: Who serves the calls.
        tuner: Has the decision.
        result: What was decided.
        sizes: Over which sizes, if they are known.

    Returns:
        What is wrong with the winner, in words: the decision on disk is dropped; "": it serves.
    """
    winner = result.winner
    owner.followed.update_status(state="loading", winner=winner, candidate="")
    if winner != owner.served_by:
        problem = tuner.recompile_winner(winner, lambda candidate: _load(owner, candidate))
        if problem:
            return problem
    if owner.subject is not None:
        owner.subject.note_winner(winner, result.candidates)
    owner.finish_with_winner(winner, result, tuner, sizes)
    return ""


def _load(owner: BackgroundTunedGraph, candidate: Candidate) -> None:
    """Compiles a candidate in this process, and compares it with eager.

    Torch's generators are let alone, and so are the weights: calls use both meanwhile.

    Raises:
        WrongWinner: It is wrong, or does not run what it was given.
    """
    with owner.context() as subject:
        run = _build(owner, subject, candidate)
        for values in _inputs(owner):
            if mismatch := _mismatch(owner, subject, candidate, run, values):
                raise UnusableWinnerError(f"computes wrong results in this process: {mismatch}")
        if failure := why_failed(subject.reports[candidate.name]):
            raise UnusableWinnerError(failure)


def _build(owner: BackgroundTunedGraph, subject: CapturedGraphSubject, candidate: Candidate) -> Run:
    """Returns the candidate, compiled; for all sizes that calls have had.

    Raises:
        WrongWinner: It assumes something that cannot be looked at in calls.
    """
    symbols = owner.symbols
    # AOT Autograd and Inductor have settings for all threads.
    if symbols is None:
        with private.blocking_other_captures(), private.entering_tracing_context():
            run = owner.wrap_with_private_rng(subject.compile_candidate(candidate))
            if subject.kind == "training":  # the backward graph is compiled when it is needed
                run(_arguments(subject, subject.values).make_call_inputs())
            return run
    symbols.traffic.stop_recording()
    # What new sizes need is compiled in the background as well.
    options = dataclasses.replace(subject.options, while_compiling="eager")
    subject.bounds = exact_size_bounds(
        subject.captured, [x for x, _ in symbols.traffic.inputs_by_size()]
    )
    context = symbols.context(subject.example_inputs)
    with private.blocking_other_captures(), private.entering_tracing_context(context):
        run = owner.wrap_with_private_rng(subject.compile_candidate(candidate, options))
        for values in _inputs(owner):
            run(_arguments(subject, values).make_call_inputs())
    if unknown := symbols.assumptions_since_capture.unresolved_symbols:
        names = ", ".join(sorted(map(str, unknown)))
        raise UnusableWinnerError(f"depends on {names}, which cannot be checked against the inputs")
    return run


def _inputs(owner: BackgroundTunedGraph) -> list[list[Any]]:
    """Returns inputs to compare a candidate with eager on: of all sizes that it is to serve."""
    assert owner.subject is not None
    if owner.symbols is None:
        return [owner.subject.values]
    seen, assumed = owner.symbols.traffic.inputs_by_size(), owner.symbols.assumptions_since_capture
    return [
        values for values, _ in seen if assumed.unresolved_symbols or assumed.allows_sizes(values)
    ]


def _arguments(subject: CapturedGraphSubject, values: Sequence[Any]) -> TrialInputs:
    mutated = subject.mutated_positions()
    if subject.kind == "training":  # which writes to weights, and prepares none
        return TrialInputs(clone_inputs(values), (), mutated, watched=False)
    static = subject.static_positions
    kept = clone_inputs(values, static - mutated)  # calls write to the others
    return TrialInputs(kept, static, mutated, watched=False)


def _mismatch(
    owner: BackgroundTunedGraph,
    subject: CapturedGraphSubject,
    candidate: Candidate,
    run: Run,
    values: Sequence[Any],
) -> str:
    """Returns what is wrong with a candidate's results, if weights do not change meanwhile."""
    for _ in range(_COMPARISONS):
        before = _versions(subject)
        arguments = _arguments(subject, values)
        work = subject.make_workload(arguments)
        original = owner.wrap_with_private_rng(work.original)
        precise = work.precise and owner.wrap_with_private_rng(work.precise)
        trial = VerificationCase(
            arguments, original, precise, work.promised, work.outputs, draws=False
        )
        COUNTS.add(verified=1)
        verdict = trial.verify_candidate(run, candidate.is_bfloat16)
        if not verdict.wrong or before == _versions(subject):
            break
    return verdict.wrong


def _versions(subject: CapturedGraphSubject) -> list[int]:
    written = subject.mutated_positions()
    tensors = (x for i, x in enumerate(subject.values) if i not in written)
    return [x._version for x in tensors if isinstance(x, Tensor) and not x.is_inference()]
