"""The process in which autotune tunes in the background, and tries candidates that may crash.

python -m dynamo_backends.autotune.worker

Requests and answers are JSON, one per line, on standard input and output (see `WorkerProcess`);
between them lines with "said" tell what is going on. The graph and copies of its inputs are in a
folder (see `serialization`).
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from dynamo_backends import _torch_private as private
from dynamo_backends.autotune import serialization
from dynamo_backends.autotune.backend import ForwardBackwardAutotune
from dynamo_backends.autotune.candidates import Candidate
from dynamo_backends.autotune.graph_budget import GraphBudget
from dynamo_backends.autotune.options import SPLIT, AutotuneOptions
from dynamo_backends.autotune.serialization import cpu_autocast, rebuild_with_parameters
from dynamo_backends.autotune.session import (
    PreparedCandidate,
    SessionOutcome,
    TuningSession,
    UnsuitableCandidateError,
    Workload,
)
from dynamo_backends.autotune.symbolic_sizes import (
    SizeAssumptions,
    SymbolDescription,
    match_recaptured_inputs,
)
from dynamo_backends.autotune.trial_inputs import TrialInputs
from dynamo_backends.autotune.tuning_subjects import CapturedGraphSubject, wrap_with_backward
from dynamo_backends.autotune.verification import verify_on_cases
from dynamo_backends.interface.errors import brief_error
from dynamo_backends.interface.report import CandidateReport, to_json_types
from dynamo_backends.verify.reference import captured_graph_in_float64
from dynamo_backends.workers.budget import Budget, cpu_s, share_budget
from dynamo_backends.workers.progress import Progress
from dynamo_backends.workers.race import Run
from dynamo_backends.workers.worker_process import Say, serve


def answer_request(request: dict[str, Any], say: Say) -> dict[str, Any]:
    """Answers a request: tries one candidate, tunes a graph, or just starts up ({})."""
    if "folder" not in request:
        return {}
    try:
        folder = Path(request["folder"])
        if "settings" in request:
            serialization.apply_settings(request["settings"])
        graph, values = serialization.read(folder)
        if "candidate" in request:
            return {"problem": try_candidate(graph, values, request)}
        others = serialization.read_other_inputs(folder, values)
        return tune_recaptured(graph, values, others, request, say)
    except Exception as error:
        return {"problem": brief_error(error)}
    finally:
        torch._dynamo.reset()


def parse_options(given: dict[str, Any]) -> AutotuneOptions:
    """Makes `AutotuneOptions` from their JSON form."""
    settings: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    return AutotuneOptions(**settings)


# Trying one candidate.


def try_candidate(graph: fx.GraphModule, values: list[Any], request: dict[str, Any]) -> str:
    """Compiles, calls and verifies one candidate; returns what is wrong, or "".

    Returns:
        What goes wrong; "" if nothing does.
    """
    candidate = Candidate(**request["candidate"])
    options, training = parse_options(request["options"]), request["training"]
    uncopied = frozenset(request["uncopied"])
    adapt: Callable[[Callable[..., Any]], Run] = (
        wrap_with_backward if training else lambda compiled: lambda args: compiled(*args)
    )

    def compile_captured(captured: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return candidate.compile(captured, inputs, options)

    module = rebuild_with_parameters(graph, values, uncopied)
    compiled = torch.compile(module, backend=compile_captured)
    outputs: Any = graph.graph.output_node().args[0]
    workload = Workload(
        adapt(graph.forward),
        adapt(captured_graph_in_float64(graph)),
        TrialInputs(values, uncopied, request["mutated"]),
        outputs=len(outputs) if training else None,
    )
    with torch.set_grad_enabled(training):
        trials = workload.make_cases()
        run = adapt(lambda *args: compiled(*(a for i, a in enumerate(args) if i not in uncopied)))
        try:
            verdict = verify_on_cases(trials, run, candidate.is_bfloat16)
        except Exception as error:
            return f"failed in a process of its own: {brief_error(error)}"
    return f"wrong: {verdict.wrong}" if verdict.wrong else ""


# Tuning one graph.


class _ToldProgress(Progress):
    """Tells the parent how far it is.

    Args:
        say: Writes a line.
        budget: Of which is told how much is gone.
    """

    wants_leader = True

    def __init__(self, say: Say, budget: Budget):
        super().__init__()
        self._say, self._budget = say, budget

    def begins(self, name: str, number: int, of: int) -> None:
        """See `Progress.begins`."""
        self._say({"begins": [name, number, of], "spent_s": self._budget.spent_s})

    def ended(self, row: CandidateReport) -> None:
        """See `Progress.ended`."""
        self._say({"ended": to_json_types(row), "spent_s": self._budget.spent_s})

    def leads(self, name: str) -> None:
        """See `Progress.leads`."""
        self._say({"leads": name, "spent_s": self._budget.spent_s})


def tune_recaptured(
    graph: fx.GraphModule,
    values: Sequence[Any],
    others: Sequence[Sequence[Any]],
    request: dict[str, Any],
    say: Say,
) -> dict[str, Any]:
    """Captures the graph again with Dynamo and tunes it; returns the outcome as JSON.

    Args:
        graph: As another process captured it.
        values: Copies of its inputs.
        others: Copies of inputs of other sizes.
        request: What else is known, and asked for.
        say: Tells the parent.
    """
    static = frozenset(request["static"])
    symbols = SymbolDescription(**request["symbols"]) if request["symbols"] else None
    sizes = {int(i): place for i, place in symbols.sizes.items()} if symbols else {}
    module = rebuild_with_parameters(graph, values, static, sizes)
    answers: list[dict[str, Any]] = []

    def choose(captured: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            sets = others
            if symbols is not None:
                places = match_recaptured_inputs(captured, symbols)
                sets = [_reordered(inputs, values, places, static) for values in others]
            outcome, budget = _decide(captured, inputs, sets, request, say)
            answers.append({**to_json_types(outcome), "spent_s": budget.spent_s})
        except Exception as error:
            answers.append({"problem": brief_error(error)})
        return captured.forward

    for i, kinds in symbols.dims.items() if symbols else ():
        private.mark_dims(values[int(i)], kinds)
    with torch.set_grad_enabled(request["training"]), cpu_autocast(request["settings"]["autocast"]):
        run = torch.compile(module, backend=choose, dynamic=symbols is not None)
        run(*(value for i, value in enumerate(values) if i not in static and i not in sizes))
    if len(answers) != 1:
        return {"problem": "the graph copy was not captured as one graph"}
    return answers[0]


def _reordered(
    inputs: Sequence[Any], values: Sequence[Any], places: Sequence[int], static: Collection[int]
) -> list[Any]:
    """Returns inputs of the graph that was captured anew; weights are its own.

    Args:
        inputs: That it was captured with.
        values: Inputs of the old graph.
        places: See `match_recaptured_inputs`.
        static: Which of the old ones are weights.
    """
    return [x if p in static else values[p] for x, p in zip(inputs, places, strict=True)]


def _decide(
    captured: fx.GraphModule,
    inputs: Sequence[Any],
    others: Sequence[Sequence[Any]],
    request: dict[str, Any],
    say: Say,
) -> tuple[SessionOutcome, Budget]:
    split = ForwardBackwardAutotune()
    competing = [Candidate(**given) for given in request["candidates"]]
    competing = [dataclasses.replace(c, made=split) if c.backend == SPLIT else c for c in competing]
    known = list(map(CandidateReport.from_dict, request["known"]))
    symbols = private.CapturedSymbols(inputs)
    options = parse_options(request["options"])
    whole = split if request["training"] else None
    subject = CapturedGraphSubject(captured, inputs, options, request["number"], whole)
    if others:
        subject.bounds = None
    subject.first = request["first"]
    budget = Budget(options.budget_s, request["spent_s"], cpu_s, request["owes"])
    share_budget(repr(options), budget)  # with forward and backward graphs inside of this one
    with budget.spending(), subject.tuning_context():
        static, mutated = subject.static_positions, subject.mutated_positions()
        more = [TrialInputs(values, static, mutated, watched=False) for values in others]
        workload = subject.make_workload(others=more, counts=request["counts"])
        prepared = [subject.prepare_candidate(candidate, workload) for candidate in competing]
        if others:
            prepared = [_where_right(each, workload, symbols, subject.kind) for each in prepared]
        session = TuningSession(
            workload,
            prepared,
            options,
            subject.key.make_cost_model(),
            budget,
            _ToldProgress(say, budget),
            known,
            GraphBudget(budget, in_any_case=request["in_any_case"]),
        )
        return session.choose_winner(), budget


def _where_right(
    prepared: PreparedCandidate, workload: Workload, symbols: private.CapturedSymbols, kind: str
) -> PreparedCandidate:
    """Returns a candidate as it would serve: eager runs the sizes that it is not compiled for.

    Dynamo's guards are not asked when sizes change here.
    """

    def build() -> Run:
        run, eager = prepared.build(), workload.original
        if kind == "training":  # the backward graph may be compiled, and assume more, in a call
            run(workload.arguments.make_call_inputs())
        assumed = SizeAssumptions(symbols.new_assumptions(), symbols.numbers)
        if assumed.unresolved_symbols:
            raise UnsuitableCandidateError(
                f"depends on {assumed}, which cannot be checked against the inputs"
            )
        return lambda args: run(args) if assumed.allows_sizes(args) else eager(args)

    return dataclasses.replace(prepared, build=build)


def main() -> None:
    """Serves requests from standard input until it is closed."""
    serve(answer_request, ends_with_thread=True)


if __name__ == "__main__":
    main()
