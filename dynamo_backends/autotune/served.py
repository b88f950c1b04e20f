"""What Dynamo calls in place of a graph that is tuned beside the calls."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from dynamo_backends import _torch_private as private
from dynamo_backends.autotune.arguments import copies
from dynamo_backends.autotune.autocast import autocast_as, autocast_here
from dynamo_backends.autotune.chosen import Chosen
from dynamo_backends.autotune.ensemble import Ensemble
from dynamo_backends.autotune.flow import Choice, DecisionFlow
from dynamo_backends.autotune.names import EAGER
from dynamo_backends.autotune.status import Followed, TuningStatus
from dynamo_backends.autotune.symbols import Symbols, has_symbols
from dynamo_backends.autotune.traffic import counted, within
from dynamo_backends.graph.private_draws import PrivateDraws, privately
from dynamo_backends.interface.publishing import publish, trace
from dynamo_backends.interface.report import CandidateReport, GraphReport
from dynamo_backends.pipeline import background
from dynamo_backends.tuning.race import Run


class TunedBeside:
    """What Dynamo calls in place of a graph.

    Args:
        ensemble: The candidates; its values are copied.
        reason: Why the graph is not tuned beside calls; empty: it is.

    Attributes:
        draws: Whether the graph draws random numbers (see `look`).
        autocast: In which it was captured.
    """

    def __init__(self, ensemble: Ensemble, reason: str):
        self.eager = eager = ensemble.captured.forward
        self.report: GraphReport = ensemble.described(EAGER)[0]
        self.report.chosen = EAGER
        title = f"{self.report.kind} graph {ensemble.number} with {ensemble.ops} operations"
        state = TuningStatus(title, budget_s=ensemble.options.budget_s)
        self.followed = Followed(state, [self.report])
        self.is_inference = torch.is_inference_mode_enabled()
        self.autocast = autocast_here()
        self.draws = False
        self.served_by = EAGER
        self.ensemble: Ensemble | None = None
        self.symbols: Symbols | None = None
        self.call: Callable[..., Any] = eager
        if reason:
            self.followed.give_up(reason)
            return
        static = private.captured_static_inputs(ensemble.captured)
        inputs = ensemble.example_inputs
        with ensemble.apart():
            ensemble.values = copies(ensemble.values, static)
        ensemble.example_inputs = [
            x if isinstance(x, torch.SymInt) else value
            for x, value in zip(inputs, ensemble.values, strict=True)
        ]
        self.ensemble = ensemble
        self.call = _going_first(eager)
        if has_symbols(ensemble.captured):
            self.symbols = Symbols(ensemble.captured, inputs, ensemble.values, static)
            self.call = _going_first(counted(eager, self.symbols.traffic))

    def __call__(self, *args: Any) -> Any:
        """Runs the graph."""
        return self.call(*args)

    @contextlib.contextmanager
    def apart(self) -> Iterator[Ensemble]:
        """The candidates, in the modes that the graph was captured in."""
        assert self.ensemble is not None
        with (
            torch.inference_mode(self.is_inference),
            autocast_as(self.autocast),
            self.ensemble.apart(),
        ):
            yield self.ensemble

    def look(self) -> None:
        """Calls the graph on copies: finds out whether it draws, and which inputs it writes to.

        Raises:
            DrawsError: It draws, and cannot do so without taking numbers of the calls.
        """
        assert self.ensemble is not None
        with PrivateDraws() as draws:
            self.ensemble.mutated()
        self.draws = draws.has_drawn

    def alone(self, run: Run) -> Run:
        """What compiles or computes the graph, without taking random numbers of the calls."""
        return privately(run) if self.draws else run

    def serve(self, name: str, choice: Choice, flow: DecisionFlow) -> None:
        """Has a candidate that was compiled run the calls from now on."""
        ensemble = self.ensemble
        assert ensemble is not None
        own, *others = ensemble.described(name)
        kept = {field: vars(self.report)[field] for field in ("compile_id", "tuning")}
        vars(self.report).update(vars(own) | kept)  # lists of events are shared
        reports = [self.report, *others]
        ensemble.describe_choice(reports, name, choice.candidates)
        for report in reports:
            report.tuning_seconds = choice.seconds
        for report in others:  # of a backward graph
            publish(report)
        if name != EAGER:
            eager, mutated = ensemble.captured.forward, sorted(ensemble.mutated())
            compiled = ensemble.compiled[name]
            run: Callable[..., Any] = Chosen(name, compiled, eager, mutated, reports, flow.key)
            if self.symbols is not None and (assumed := self.symbols.assumed):
                run = within(assumed, run, eager, name)
            self.call = _going_first(run)
        else:
            self.call = _going_first(ensemble.captured.forward)
        self.served_by = name

    def settle(self, winner: str, choice: Choice, flow: DecisionFlow, sizes: str = "") -> None:
        """As `serve`, for good; the status says over which sizes it was chosen."""
        if winner != self.served_by or winner == EAGER:
            self.serve(winner, choice, flow)
        else:
            self.report.candidates = choice.candidates
            self.report.tuning_seconds = choice.seconds
        trace(self.report, "autotune")
        self.release()
        self.followed.change(
            state="serving", winner=winner, candidate="", meanwhile="", sizes=sizes
        )

    def release(self) -> None:
        """Lets go of what tuning needed."""
        self.ensemble = self.symbols = None

    def leave(self, reason: str, candidates: Sequence[CandidateReport] = ()) -> None:
        """Leaves the graph to eager for good, or to who serves it since the first call.

        Args:
            reason: Why.
            candidates: What is known about them, if anything is.
        """
        self.release()
        self.report.candidates = tuple(candidates) or self.report.candidates
        if self.served_by == EAGER:
            self.call = _going_first(self.eager)
            self.followed.give_up(reason)
        else:
            self.followed.change(state="serving", winner=self.served_by, reason=reason)


def _going_first(run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function for whose calls the thread pauses, whichever graph it is busy with."""
    first = background.going_first(lambda args: run(*args))

    def call(*args: Any) -> Any:
        results = first(list(args))
        background.backward_first(results)
        return results

    return call
