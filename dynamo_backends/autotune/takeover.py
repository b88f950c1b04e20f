"""Beside the calls: has a graph tuned, and lets the winner take over.

All of it is done by the thread of `pipeline.background`, which lets calls go first. A winner is
compared with eager on copies there and not in a call, which would take the time of both.
"""

import dataclasses
import logging
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dynamo_backends import _torch_private as private
from dynamo_backends.autotune import serialization, tuner
from dynamo_backends.autotune.arguments import Arguments, copies
from dynamo_backends.autotune.candidates import Candidate
from dynamo_backends.autotune.ensemble import Ensemble
from dynamo_backends.autotune.flow import Choice, DecisionFlow
from dynamo_backends.autotune.isolation import is_isolated
from dynamo_backends.autotune.listening import GaveUp, Task
from dynamo_backends.autotune.means import Means
from dynamo_backends.autotune.names import EAGER
from dynamo_backends.autotune.served import TunedBeside
from dynamo_backends.autotune.session import Outcome, failure_of
from dynamo_backends.autotune.symbols import bounds_of
from dynamo_backends.autotune.verify import Trial
from dynamo_backends.graph.private_draws import DrawsError
from dynamo_backends.graph.tf32 import product_precision
from dynamo_backends.interface.errors import brief_error
from dynamo_backends.interface.registry import get_backend, is_found_elsewhere
from dynamo_backends.interface.report import CandidateReport, plain
from dynamo_backends.pipeline import background
from dynamo_backends.tuning.children import environment
from dynamo_backends.tuning.counts import COUNTS
from dynamo_backends.tuning.race import Run

log = logging.getLogger("dynamo_backends")

_ALONE = "not tried: it is registered in this process alone, and another one tunes"

_SPENT = "what is left of the budget of {:g} s suffices for no candidate"

_COMPARISONS = 3  # while weights change


class _Excluded(Exception):
    """The winner cannot serve here; the message says why."""


def begin(owner: TunedBeside) -> None:
    """Lets the winner of an earlier decision take over, or has the graph tuned."""
    try:
        with owner.apart() as ensemble:
            owner.look()
            competing = ensemble.competing()
            flow = DecisionFlow(ensemble.question(), competing, ensemble.options)
            decision = flow.recall()
        if decision is not None:
            choice = Choice(decision.winner, decision.candidates, decision.seconds)
            try:
                _take_over(owner, flow, competing, choice)
                return
            except _Excluded as error:
                log.warning("autotune chooses anew, %s %s", decision.winner, error)
        options = ensemble.options
        isolated = [c.name for c in competing if is_isolated(c, options)]

        def decided(owner: TunedBeside, outcome: Outcome) -> None:
            try:
                assert owner.ensemble is not None
                choice = flow.accept(outcome, owner.ensemble.mutated())
                if not outcome.is_tried:
                    owner.leave(_SPENT.format(flow.budget.total_s), choice.candidates)
                    return
                sizes = str(owner.symbols.traffic) if owner.symbols is not None else ""
                _take_over(owner, flow, competing, choice, sizes)
            except _Excluded as error:
                owner.leave(f"{outcome.winner} was verified, and {error}")

        def prepare(owner: TunedBeside, folder: Path) -> dict[str, Any]:
            with owner.apart() as ensemble:
                in_any_case = list(ensemble.begin_with_relatives(competing))
            if untried := flow.untried(Means(flow.budget, in_any_case=in_any_case)):
                owner.report.candidates = untried
                raise GaveUp(_SPENT.format(flow.budget.total_s))
            first = {"first": list(ensemble.first), "in_any_case": in_any_case}
            return {**_prepare(owner, folder, competing), **first}

        def leads(owner: TunedBeside, name: str) -> None:
            candidate = next(c for c in competing if c.name == name)
            job = lambda owner: _serve_meanwhile(owner, flow, candidate)  # noqa: E731
            background.submit(("leads", name), job, owner=owner)

        tuner.add(
            Task(
                owner=weakref.ref(owner),
                followed=owner.followed,
                budget=flow.budget,
                prepare=prepare,
                leads=leads,
                is_ready=_is_ready,
                decided=decided,
                left=TunedBeside.leave,
                isolated=isolated,
                timeout_s=options.trial_timeout_s,
            )
        )
    except Exception as error:
        log.debug("tuning beside the calls failed", exc_info=True)
        owner.leave(str(error) if isinstance(error, DrawsError) else brief_error(error))


def _prepare(owner: TunedBeside, folder: Path, competing: Sequence[Candidate]) -> dict[str, Any]:
    """Writes a graph and its inputs for the other process; the request."""
    with owner.apart() as ensemble:
        static, symbols = private.captured_static_inputs(ensemble.captured), owner.symbols
        serialization.write(folder, ensemble.captured, ensemble.values)
        counts: list[int] = []
        if symbols is not None:
            symbols.traffic.close()
            sets, counts = zip(*symbols.traffic.seen(), strict=True)
            serialization.write_others(folder, sets[1:], static)
        options = dataclasses.replace(ensemble.options, mode="wait", isolate="off")
        alone = [c for c in competing if _is_alone(c)]
        return {
            "known": [plain(CandidateReport(c.name, _ALONE)) for c in alone],
            "candidates": [
                dataclasses.asdict(dataclasses.replace(c, made=None)) for c in competing
            ],
            "training": ensemble.kind == "training",
            "options": dataclasses.asdict(options),
            "static": sorted(static),
            "symbols": dataclasses.asdict(symbols.description) if symbols is not None else {},
            "counts": counts,
            "number": ensemble.number,
            "settings": {
                "environment": environment(),
                "threads": torch.get_num_threads(),
                "precision": product_precision(),
                "autocast": owner.autocast,
                "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
                "deterministic": torch.are_deterministic_algorithms_enabled(),
                "warns": torch.is_deterministic_algorithms_warn_only_enabled(),
            },
        }


def _is_ready(owner: TunedBeside) -> bool:
    return owner.symbols is None or owner.symbols.traffic.suffices


def _is_alone(candidate: Candidate) -> bool:
    if candidate.made is not None:  # "split", in which backends compete there
        return False
    return candidate.owner == "ours" and not is_found_elsewhere(get_backend(candidate.backend))


def _serve_meanwhile(owner: TunedBeside, flow: DecisionFlow, candidate: Candidate) -> None:
    """Has a candidate run the calls until tuning has ended, unless another one does already."""
    if owner.ensemble is None or owner.served_by != EAGER:
        return
    name = candidate.name
    try:
        problem = _problem(owner, candidate)
    except Exception as error:
        problem = f"failed: {brief_error(error)}"
    if problem:
        log.info("autotune: %s does not serve meanwhile: it %s", name, problem)
        return
    owner.serve(name, Choice(name, (CandidateReport(name),)), flow)
    owner.followed.change(meanwhile=name)


def _take_over(
    owner: TunedBeside,
    flow: DecisionFlow,
    competing: Sequence[Candidate],
    choice: Choice,
    sizes: str = "",
) -> None:
    """Loads the winner, compares it with eager, and has it run the calls.

    Args:
        owner: Who serves the calls.
        flow: Has the decision.
        competing: Who takes part.
        choice: What was decided.
        sizes: Over which sizes, if they are known.

    Raises:
        _Excluded: It fails, or is wrong; the decision on disk is dropped.
    """
    winner = choice.winner
    owner.followed.change(state="loading", winner=winner, candidate="")
    if winner not in (EAGER, owner.served_by):
        candidate = next(c for c in competing if c.name == winner)
        try:
            problem = _problem(owner, candidate)
        except _Excluded as error:
            problem = str(error)
        except Exception as error:
            problem = f"failed: {brief_error(error)}"
        if problem:
            flow.forget()
            raise _Excluded(problem)
    if owner.ensemble is not None:
        owner.ensemble.note_choice(choice)
    owner.settle(winner, choice, flow, sizes)


def _problem(owner: TunedBeside, candidate: Candidate) -> str:
    """What is wrong with a candidate that is compiled here, in words; empty if nothing is.

    Torch's generators are let alone, and so are the weights: calls use both meanwhile.
    """
    with owner.apart() as ensemble:
        COUNTS.add(compiled=1)
        run = _built(owner, ensemble, candidate)
        for values in _inputs(owner):
            if wrong := _wrong(owner, ensemble, candidate, run, values):
                return f"is wrong here: {wrong}"
        return failure_of(ensemble.reports[candidate.name])


def _built(owner: TunedBeside, ensemble: Ensemble, candidate: Candidate) -> Run:
    """Returns the candidate, compiled; for all sizes that calls have had.

    Raises:
        _Excluded: It assumes something that cannot be looked at in calls.
    """
    symbols = owner.symbols
    # AOT Autograd and Inductor have settings for all threads.
    if symbols is None:
        with private.without_captures(), private.as_if_captured():
            run = owner.alone(ensemble.build(candidate))
            if ensemble.kind == "training":  # the backward graph is compiled when it is needed
                run(_given(ensemble, ensemble.values).fresh())
            return run
    symbols.traffic.close()
    # What new sizes need is compiled beside the calls as well.
    options = dataclasses.replace(ensemble.options, while_compiling="eager")
    ensemble.bounds = bounds_of(ensemble.captured, [x for x, _ in symbols.traffic.seen()])
    context = symbols.context(ensemble.example_inputs)
    with private.without_captures(), private.as_if_captured(context):
        run = owner.alone(ensemble.build(candidate, options))
        for values in _inputs(owner):
            run(_given(ensemble, values).fresh())
    if unknown := symbols.assumed.unknown:
        names = ", ".join(sorted(map(str, unknown)))
        raise _Excluded(f"assumes something of {names}, which no input tells")
    return run


def _inputs(owner: TunedBeside) -> list[list[Any]]:
    """Those that a candidate is compared with eager on: of all sizes that it is to serve."""
    assert owner.ensemble is not None
    if owner.symbols is None:
        return [owner.ensemble.values]
    seen, assumed = owner.symbols.traffic.seen(), owner.symbols.assumed
    return [values for values, _ in seen if assumed.unknown or assumed.holds(values)]


def _given(ensemble: Ensemble, values: Sequence[Any]) -> Arguments:
    mutated = ensemble.mutated()
    if ensemble.kind == "training":  # which writes to weights, and prepares none
        return Arguments(copies(values), (), mutated, watched=False)
    static = private.captured_static_inputs(ensemble.captured)
    kept = copies(values, static - mutated)  # calls write to the others
    return Arguments(kept, static, mutated, watched=False)


def _wrong(
    owner: TunedBeside, ensemble: Ensemble, candidate: Candidate, run: Run, values: Sequence[Any]
) -> str:
    """What is wrong with a candidate's results, if weights do not change meanwhile."""
    for _ in range(_COMPARISONS):
        before = _versions(ensemble)
        given = _given(ensemble, values)
        subject = ensemble.subject("", given)
        precise = subject.precise and owner.alone(subject.precise)
        promised, outputs = subject.promised, subject.outputs
        trial = Trial(given, owner.alone(subject.original), precise, promised, outputs, draws=False)
        COUNTS.add(verified=1)
        verdict = trial.judge(run, candidate.reduced)
        if not verdict.wrong or before == _versions(ensemble):
            break
    return verdict.wrong


def _versions(ensemble: Ensemble) -> list[int]:
    written = ensemble.mutated()
    tensors = (x for i, x in enumerate(ensemble.values) if i not in written)
    return [x._version for x in tensors if isinstance(x, Tensor) and not x.is_inference()]
