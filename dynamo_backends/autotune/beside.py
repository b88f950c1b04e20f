"""`mode="background"`: a graph runs in eager until the winner of another process takes over."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dynamo_backends.autotune.ensemble import Ensemble
from dynamo_backends.autotune.flow import Choice, DecisionFlow
from dynamo_backends.autotune.names import EAGER
from dynamo_backends.autotune.served import TunedBeside
from dynamo_backends.autotune.session import failure_of
from dynamo_backends.autotune.symbols import has_symbols
from dynamo_backends.autotune.takeover import begin
from dynamo_backends.autotune.verify import judge
from dynamo_backends.graph.private_draws import DrawsError
from dynamo_backends.interface.errors import brief_error
from dynamo_backends.interface.publishing import publish
from dynamo_backends.interface.report import CandidateReport
from dynamo_backends.pipeline import background
from dynamo_backends.tuning.counts import COUNTS

log = logging.getLogger("dynamo_backends")


def compile_beside(ensemble: Ensemble) -> Callable[..., Any]:
    """Returns what Dynamo is to call in place of a graph.

    Args:
        ensemble: The candidates.
    """
    owner = TunedBeside(ensemble, _unsuitable(ensemble))
    publish(owner.report)
    if owner.ensemble is None:
        return owner
    try:
        at_once = ensemble.options.first_call_s and owner.symbols is None
        if at_once and _serves_at_once(owner):
            return owner
    except DrawsError as error:
        owner.leave(str(error))
        return owner
    if not background.submit("begin", begin, owner=owner):
        owner.leave("too many graphs were captured at once")
    return owner


def _unsuitable(ensemble: Ensemble) -> str:
    """Returns why a graph is not tuned beside calls; empty if it is."""
    of_one_size = not has_symbols(ensemble.captured)
    if ensemble.kind == "training" and of_one_size and not ensemble.options.cache:
        return "what is chosen for forward and backward graph is found on disk, and cache=False"
    if any(isinstance(x, torch.SymFloat | torch.SymBool) for x in ensemble.example_inputs):
        return "an input is a number that is no size, for which mode='wait' tunes alone"
    if any(x is None for x in ensemble.values):
        return "a size is a symbol without a value, of which there is no copy"
    if ensemble.devices not in ([], ["cpu"]):
        return "its tensors are not on the CPU, and another process would take memory there twice"
    kinds = {type(x) for x in ensemble.values if isinstance(x, Tensor)}
    if others := kinds - {Tensor, nn.Parameter, nn.Buffer}:
        return f"an input is a {min(kind.__name__ for kind in others)}, of which there is no copy"
    return ""


# In the first call.


def _serves_at_once(owner: TunedBeside) -> bool:
    """Compiles in the first call who promises most, if that takes no time; True: it is settled."""
    with owner.apart() as ensemble:
        options, competing = ensemble.options, ensemble.competing()
        question = ensemble.question()
        flow, model = DecisionFlow(question, competing, options), question.model()
        decision = flow.recall()
        if decision is not None:
            name = decision.winner
            rows = {row.name: row.compile_s for row in decision.candidates}
            choice = Choice(name, decision.candidates, decision.seconds)
        elif ensemble.kind == "training":  # of which two graphs would be tuned in the call
            return False
        else:
            name = next(iter(model.order([c.name for c in competing])), EAGER)
            rows, choice = {}, Choice(name, (CandidateReport(name),))
        expected = rows.get(name) or model.predict(name).compile_s
        if name == EAGER or expected > options.first_call_s:
            return False
        owner.look()
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
