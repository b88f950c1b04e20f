"""`mode="background"`: a graph runs in eager until the winner of another process takes over.

All that takes time is done by the thread of `pipeline.background`, in this order: `_begin` looks
for a decision on disk, `_prepare` writes the graph for the other process, `_take_over` compiles or
loads the winner and compares it with eager on copies, so that no call does.
"""

import contextlib
import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dynamo_backends import _torch_private as private
from dynamo_backends.autotune import serialization, tuner
from dynamo_backends.autotune.arguments import Arguments, copies
from dynamo_backends.autotune.candidates import Candidate
from dynamo_backends.autotune.chosen import Chosen
from dynamo_backends.autotune.cost import CostModel
from dynamo_backends.autotune.decisions import Decisions
from dynamo_backends.autotune.ensemble import Ensemble
from dynamo_backends.autotune.flow import Choice, DecisionFlow
from dynamo_backends.autotune.isolation import is_isolated
from dynamo_backends.autotune.names import EAGER
from dynamo_backends.autotune.session import Outcome, failure_of
from dynamo_backends.autotune.status import Followed, TuningStatus
from dynamo_backends.autotune.verify import Trial, judge
from dynamo_backends.graph.random import DrawsError, RefusingDraws
from dynamo_backends.interface.errors import brief_error
from dynamo_backends.interface.publishing import publish, trace
from dynamo_backends.interface.report import CandidateReport, GraphReport
from dynamo_backends.pipeline import background
from dynamo_backends.runtime.tf32 import product_precision
from dynamo_backends.tuning.children import environment
from dynamo_backends.tuning.counts import COUNTS

log = logging.getLogger("dynamo_backends")

_COMPARISONS = 3  # while weights change


class _Excluded(Exception):
    """The winner cannot serve here; the message says why."""


class TunedBeside:
    """What Dynamo calls in place of a graph.

    Args:
        ensemble: The candidates; its values are copied.
        reason: Why the graph is not tuned beside calls; empty: it is.
    """

    def __init__(self, ensemble: Ensemble, reason: str):
        eager = ensemble.captured.forward
        self.report: GraphReport = ensemble.described(EAGER)[0]
        self.report.chosen = EAGER
        title = f"{self.report.kind} graph {ensemble.number} with {ensemble.ops} operations"
        state = TuningStatus(title, budget_s=ensemble.options.budget_s)
        self.followed = Followed(state, [self.report])
        self.is_inference = torch.is_inference_mode_enabled()
        self.served_by = EAGER
        self.ensemble: Ensemble | None = None
        self.call: Callable[..., Any] = eager
        if reason:
            self.followed.give_up(reason)
            return
        static = private.captured_static_inputs(ensemble.captured)
        ensemble.values = ensemble.example_inputs = copies(ensemble.values, static)
        self.ensemble = ensemble
        first = background.going_first(lambda args: eager(*args))
        self.call = lambda *args: first(list(args))

    def __call__(self, *args: Any) -> Any:
        """Runs the graph."""
        return self.call(*args)

    @contextlib.contextmanager
    def apart(self) -> Iterator[Ensemble]:
        """The candidates, in the modes that the graph was captured in."""
        assert self.ensemble is not None
        with torch.inference_mode(self.is_inference), self.ensemble.apart():
            yield self.ensemble

    def serve(self, name: str, choice: Choice, flow: DecisionFlow) -> None:
        """Has a candidate that was compiled run the calls from now on."""
        ensemble = self.ensemble
        assert ensemble is not None
        own, *others = ensemble.described(name)
        kept = {field: vars(self.report)[field] for field in ("compile_id", "tuning")}
        vars(self.report).update(vars(own) | kept)  # lists of events are shared
        reports = [self.report, *others]
        ensemble.describe_choice(reports, name, choice.candidates)
        self.report.tuning_seconds = choice.seconds
        if name != EAGER:
            eager, mutated = ensemble.captured.forward, sorted(ensemble.mutated())
            compiled = ensemble.compiled[name]
            self.call = Chosen(name, compiled, eager, mutated, reports, flow.key)
        self.served_by = name

    def settle(self, winner: str, choice: Choice, flow: DecisionFlow) -> None:
        """As `serve`, for good."""
        if winner != self.served_by or winner == EAGER:
            self.serve(winner, choice, flow)
        trace(self.report, "autotune")
        self.release()
        self.followed.change(state="serving", winner=winner, candidate="")

    def release(self) -> None:
        """Lets go of what tuning needed."""
        self.ensemble = None
        if self.served_by == EAGER:
            self.call = self.call  # the way through `going_first` costs next to nothing


def compile_beside(ensemble: Ensemble, differentiated: bool) -> Callable[..., Any]:
    """What Dynamo is to call in place of a graph.

    Args:
        ensemble: The candidates.
        differentiated: Whether gradients are computed.
    """
    owner = TunedBeside(ensemble, _unsuitable(ensemble, differentiated))
    publish(owner.report)
    if owner.ensemble is None:
        return owner
    try:
        if ensemble.options.first_call_s and _serves_at_once(owner):
            return owner
    except DrawsError as error:
        _leave(owner, str(error))
        return owner
    if not background.submit("begin", _begin, owner=owner):
        _leave(owner, "too many graphs were captured at once")
    return owner


def _unsuitable(ensemble: Ensemble, differentiated: bool) -> str:
    """Why a graph is not tuned beside calls; empty if it is."""
    if differentiated:
        return "gradients are computed, for which mode='wait' tunes alone"
    if private.is_autocast_on():
        return "autocast is on, which other threads and processes do not see; use mode='wait'"
    symbols = torch.SymInt | torch.SymFloat | torch.SymBool
    sizes = (s for x in ensemble.example_inputs if isinstance(x, Tensor) for s in x.shape)
    if any(isinstance(x, symbols) for x in (*ensemble.example_inputs, *sizes)):
        return "its sizes are symbols, for which mode='wait' tunes alone"
    if ensemble.devices not in ([], ["cpu"]):
        return "its tensors are not on the CPU, and another process would take memory there twice"
    kinds = {type(x) for x in ensemble.values if isinstance(x, Tensor)}
    if others := kinds - {Tensor, nn.Parameter, nn.Buffer}:
        return f"an input is a {min(kind.__name__ for kind in others)}, of which there is no copy"
    return ""


def _leave(owner: TunedBeside, reason: str) -> None:
    """Leaves a graph to eager for good."""
    owner.release()
    owner.followed.give_up(reason)


# In the first call.


def _serves_at_once(owner: TunedBeside) -> bool:
    """Compiles in the first call who promises most, if that takes no time; True: it is settled."""
    with owner.apart() as ensemble:
        options, competing = ensemble.options, ensemble.competing()
        flow = DecisionFlow(ensemble.question(), competing, options)
        model = CostModel(Decisions().all())
        decision = flow.recall()
        if decision is not None:
            name = decision.winner
            rows = {row.name: row.compile_s for row in decision.candidates}
            choice = Choice(name, decision.candidates, decision.seconds)
        else:
            name = next(iter(model.order([c.name for c in competing], ensemble.ops)), EAGER)
            rows, choice = {}, Choice(name, (CandidateReport(name),))
        expected = rows.get(name) or model.predict(name, ensemble.ops).compile_s
        if name == EAGER or expected > options.first_call_s:
            return False
        with RefusingDraws():
            ensemble.mutated()
        candidate = next(c for c in competing if c.name == name)
        try:
            COUNTS.add(compiled=1)
            run = ensemble.build(candidate)
            verdict = judge(ensemble.subject("").trials(), run, candidate.reduced)
            if verdict.wrong or failure_of(ensemble.reports[name]):
                return False
        except Exception as error:
            log.debug("%s does not run the first call: %s", name, brief_error(error))
            return False
        if decision is None:
            owner.serve(name, choice, flow)
            return False
    owner.settle(name, choice, flow)
    return True


# Beside the calls.


def _begin(owner: TunedBeside) -> None:
    """Lets the winner of an earlier decision take over, or has the graph tuned."""
    try:
        with owner.apart() as ensemble:
            with RefusingDraws():
                ensemble.mutated()
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
                _take_over(owner, flow, competing, choice)
            except _Excluded as error:
                _leave(owner, f"{outcome.winner} was proven right, and {error}")

        def prepare(owner: TunedBeside, folder: Path) -> dict[str, Any]:
            return _prepare(owner, folder, competing)

        asked, timeout_s = weakref.ref(owner), options.trial_timeout_s
        followed, budget = owner.followed, flow.budget
        tuner.add(tuner.Task(asked, followed, budget, prepare, decided, isolated, timeout_s))
    except Exception as error:
        log.debug("tuning beside the calls failed", exc_info=True)
        _leave(owner, str(error) if isinstance(error, DrawsError) else brief_error(error))


def _prepare(owner: TunedBeside, folder: Path, competing: Sequence[Candidate]) -> dict[str, Any]:
    """Writes a graph and its inputs for the other process; the request."""
    with owner.apart() as ensemble:
        static = private.captured_static_inputs(ensemble.captured)
        serialization.write(folder, ensemble.captured, ensemble.values)
        options = dataclasses.replace(ensemble.options, mode="wait", isolate="off")
        return {
            "candidates": [dataclasses.asdict(c) for c in competing],
            "options": dataclasses.asdict(options),
            "static": sorted(static),
            "number": ensemble.number,
            "settings": {
                "environment": environment(),
                "threads": torch.get_num_threads(),
                "precision": product_precision(),
                "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
                "deterministic": torch.are_deterministic_algorithms_enabled(),
                "warns": torch.is_deterministic_algorithms_warn_only_enabled(),
            },
        }


def _take_over(
    owner: TunedBeside, flow: DecisionFlow, competing: Sequence[Candidate], choice: Choice
) -> None:
    """Loads the winner, compares it with eager, and has it run the calls.

    Raises:
        _Excluded: It fails, or is wrong; the decision on disk is dropped.
    """
    winner = choice.winner
    owner.followed.change(state="loading", winner=winner, candidate="")
    if winner not in (EAGER, owner.served_by):
        candidate = next(c for c in competing if c.name == winner)
        try:
            problem = _problem(owner, candidate)
        except Exception as error:
            problem = f"failed: {brief_error(error)}"
        if problem:
            flow.forget()
            raise _Excluded(problem)
    owner.settle(winner, choice, flow)


def _problem(owner: TunedBeside, candidate: Candidate) -> str:
    """What is wrong with a candidate that is compiled here, in words; empty if nothing is.

    Torch's generators are let alone, and so are the weights: calls use both meanwhile.
    """
    with owner.apart() as ensemble:
        COUNTS.add(compiled=1)
        # AOT Autograd and Inductor have settings for all threads.
        with private.without_captures(), private.as_if_captured():
            run = ensemble.build(candidate)
        for _ in range(_COMPARISONS):
            before = _versions(ensemble)
            static = private.captured_static_inputs(ensemble.captured)
            given = Arguments(ensemble.values, static, ensemble.mutated(), watched=False)
            subject = dataclasses.replace(ensemble.subject(""), arguments=given)
            trial = Trial(given, subject.original, subject.precise, subject.promised, draws=False)
            COUNTS.add(verified=1)
            verdict = trial.judge(run, candidate.reduced)
            if not verdict.wrong or before == _versions(ensemble):
                break
        if verdict.wrong:
            return f"is wrong here: {verdict.wrong}"
        return failure_of(ensemble.reports[candidate.name])


def _versions(ensemble: Ensemble) -> list[int]:
    tensors = (x for x in ensemble.values if isinstance(x, Tensor) and not x.is_inference())
    return [x._version for x in tensors]
