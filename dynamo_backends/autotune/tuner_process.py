"""The process in which `mode="background"` tunes: one graph after the other.

python -m dynamo_backends.autotune.tuner_process

Requests and answers are JSON, one per line, on standard input and output; between them lines with
"said" tell what is going on. The graph and copies of its inputs are in a folder (`serialization`).
"""

import dataclasses
import os
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from dynamo_backends import _torch_private as private
from dynamo_backends.autotune import serialization
from dynamo_backends.autotune.arguments import Arguments
from dynamo_backends.autotune.autocast import autocast_as
from dynamo_backends.autotune.backend import Split
from dynamo_backends.autotune.candidates import Candidate
from dynamo_backends.autotune.ensemble import Ensemble
from dynamo_backends.autotune.means import Means
from dynamo_backends.autotune.names import SPLIT
from dynamo_backends.autotune.options import AutotuneOptions
from dynamo_backends.autotune.rehearsal import read_options, rebuilt
from dynamo_backends.autotune.session import (
    Outcome,
    PreparedCandidate,
    Subject,
    TuningSession,
    Unsuitable,
)
from dynamo_backends.autotune.symbols import Description, old_places
from dynamo_backends.autotune.traffic import Assumed
from dynamo_backends.autotune.training import TrainingEnsemble
from dynamo_backends.interface.errors import brief_error
from dynamo_backends.interface.report import CandidateReport, plain
from dynamo_backends.tuning.budget import Budget, cpu_s, share
from dynamo_backends.tuning.children import end_with_parent
from dynamo_backends.tuning.progress import Progress
from dynamo_backends.tuning.race import Run
from dynamo_backends.tuning.requests import Say, answer_all


class _Telling(Progress):
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
        self._say({"ended": plain(row), "spent_s": self._budget.spent_s})

    def leads(self, name: str) -> None:
        """See `Progress.leads`."""
        self._say({"leads": name, "spent_s": self._budget.spent_s})


def answer(request: dict[str, Any], say: Say) -> dict[str, Any]:
    """Returns what came of tuning a graph, or why nothing did; {} without one."""
    if "folder" not in request:
        return {}
    try:
        _set(request["settings"])
        graph, values = serialization.read(Path(request["folder"]))
        others = serialization.read_others(Path(request["folder"]), values)
        return tuned(graph, values, others, request, say)
    except Exception as error:
        return {"problem": brief_error(error)}
    finally:
        torch._dynamo.reset()


def _set(settings: dict[str, Any]) -> None:
    """torch and the environment are set as in the process that asks."""
    os.environ.clear()
    os.environ.update(settings["environment"])
    places = settings["environment"]["PYTHONPATH"].split(os.pathsep)
    sys.path += [place for place in places if place not in sys.path]
    torch.set_num_threads(settings["threads"])
    torch.set_float32_matmul_precision(settings["precision"])
    torch.set_default_dtype(getattr(torch, settings["dtype"]))
    torch.use_deterministic_algorithms(settings["deterministic"], warn_only=settings["warns"])


def tuned(
    graph: fx.GraphModule,
    values: Sequence[Any],
    others: Sequence[Sequence[Any]],
    request: dict[str, Any],
    say: Say,
) -> dict[str, Any]:
    """Captures the graph anew, so that it is tuned as in Dynamo's call of a backend.

    Args:
        graph: As another process captured it.
        values: Copies of its inputs.
        others: Copies of inputs of other sizes.
        request: What else is known, and asked for.
        say: Tells the parent.
    """
    static = frozenset(request["static"])
    symbols = Description(**request["symbols"]) if request["symbols"] else None
    sizes = {int(i): place for i, place in symbols.sizes.items()} if symbols else {}
    module = rebuilt(graph, values, static, sizes)
    found: list[dict[str, Any]] = []

    def choose(captured: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            given = others
            if symbols is not None:
                places = old_places(captured, symbols)
                given = [_placed(inputs, values, places, static) for values in others]
            found.append(_answered(*_decided(captured, inputs, given, request, say)))
        except Exception as error:
            found.append({"problem": brief_error(error)})
        return captured.forward

    for i, kinds in symbols.dims.items() if symbols else ():
        private.mark_dims(values[int(i)], kinds)
    with torch.set_grad_enabled(request["training"]), autocast_as(request["settings"]["autocast"]):
        run = torch.compile(module, backend=choose, dynamic=symbols is not None)
        run(*(value for i, value in enumerate(values) if i not in static and i not in sizes))
    return found[0] if len(found) == 1 else {"problem": "the copy of the graph is not one graph"}


def _placed(
    inputs: Sequence[Any], values: Sequence[Any], places: Sequence[int], static: Collection[int]
) -> list[Any]:
    """Inputs of the graph that was captured anew; weights are its own.

    Args:
        inputs: That it was captured with.
        values: Inputs of the old graph.
        places: See `old_places`.
        static: Which of the old ones are weights.
    """
    return [x if p in static else values[p] for x, p in zip(inputs, places, strict=True)]


def _decided(
    captured: fx.GraphModule,
    inputs: Sequence[Any],
    others: Sequence[Sequence[Any]],
    request: dict[str, Any],
    say: Say,
) -> tuple[Outcome, Budget]:
    split = Split()
    competing = [Candidate(**given) for given in request["candidates"]]
    competing = [dataclasses.replace(c, made=split) if c.backend == SPLIT else c for c in competing]
    known = list(map(CandidateReport.from_dict, request["known"]))
    symbols = private.CapturedSymbols(inputs)
    options: AutotuneOptions = read_options(request["options"])
    ensemble = Ensemble(captured, inputs, options, request["number"])
    if request["training"]:
        ensemble = TrainingEnsemble(captured, inputs, options, request["number"], split)
    if others:
        ensemble.bounds = None
    ensemble.first = request["first"]
    budget = Budget(options.budget_s, request["spent_s"], cpu_s, request["owes"])
    share(repr(options), budget)  # with forward and backward graphs inside of this one
    with budget.spending(), ensemble.apart():
        static, mutated = private.captured_static_inputs(captured), ensemble.mutated()
        more = [Arguments(values, static, mutated, watched=False) for values in others]
        subject = ensemble.subject("", others=more, counts=request["counts"])
        prepared = [ensemble.prepared(candidate, subject) for candidate in competing]
        if others:
            prepared = [_where_right(each, subject, symbols, ensemble.kind) for each in prepared]
        model = ensemble.question().model()
        progress = _Telling(say, budget)
        means = Means(budget, in_any_case=request["in_any_case"])
        session = TuningSession(subject, prepared, options, model, budget, progress, known, means)
        return session.decide(), budget


def _where_right(
    prepared: PreparedCandidate, subject: Subject, symbols: private.CapturedSymbols, kind: str
) -> PreparedCandidate:
    """Returns a candidate as it would serve: eager runs the sizes that it is not compiled for.

    Dynamo's guards are not asked when sizes change here.
    """

    def build() -> Run:
        run, eager = prepared.build(), subject.original
        if kind == "training":  # the backward graph may be compiled, and assume more, in a call
            run(subject.arguments.fresh())
        assumed = Assumed(symbols.assumed(), symbols.numbers)
        if assumed.unknown:
            raise Unsuitable(f"assumes {assumed}, which no input tells")
        return lambda args: run(args) if assumed.holds(args) else eager(args)

    return dataclasses.replace(prepared, build=build)


def _answered(outcome: Outcome, budget: Budget) -> dict[str, Any]:
    return {
        "winner": outcome.winner,
        "rows": plain(outcome.rows),
        "short_of_s": outcome.short_of_s,
        "seconds": plain(outcome.seconds),
        "disturbed": outcome.disturbed,
        "spent_s": budget.spent_s,
    }


def main() -> None:
    """Answers one request after the other."""
    end_with_parent()
    answer_all(answer)


if __name__ == "__main__":
    main()
