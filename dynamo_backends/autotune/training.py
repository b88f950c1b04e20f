"""A graph of Dynamo's that is differentiated.

Candidates compete with a forward and a backward pass together. One of them, "split", is the
pipeline's own way: AOT Autograd makes a forward and a backward graph, and for each of these the
backends of this package and Inductor compete (see `functional`).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends.autotune.candidates import Candidate
from dynamo_backends.autotune.ensemble import Ensemble
from dynamo_backends.autotune.names import SPLIT
from dynamo_backends.autotune.options import AutotuneOptions
from dynamo_backends.autotune.symbols import has_symbols
from dynamo_backends.interface.backend import Backend
from dynamo_backends.interface.report import CandidateReport, GraphReport
from dynamo_backends.tuning.race import Run


class TrainingEnsemble(Ensemble):
    """The candidates for one graph of Dynamo's, and its derivative.

    Args:
        captured: See `Ensemble`; so the other three.
        example_inputs: See `Ensemble`.
        options: Of autotune.
        number: Of the captured graph.
        split: The backend whose forward and backward graphs are chosen for separately.
    """

    kind = "training"

    def __init__(
        self,
        captured: fx.GraphModule,
        example_inputs: Sequence[Any],
        options: AutotuneOptions,
        number: int,
        split: Backend,
    ):
        super().__init__(captured, example_inputs, options, number)
        self._split = split

    def competing(self) -> list[Candidate]:
        """See `Ensemble.competing`: backends of this package take part inside of "split".

        With symbols each takes part with a forward and a backward graph of its own: inside of
        "split" there is a choice for each set of sizes, in a call with them.
        """
        found = [c for c in super().competing() if c.trains and not c.reduced]
        if has_symbols(self.captured):
            return found
        foreign = [c for c in found if c.owner != "ours"]
        if any(c.owner == "ours" or c.backend == "inductor" for c in found):
            foreign.append(Candidate(SPLIT, SPLIT, "ours", self._split))
        return foreign

    def grad_mode(self) -> AbstractContextManager[Any]:
        """See `Ensemble.grad_mode`."""
        return torch.enable_grad()

    def adapt(self, compiled: Callable[..., Any]) -> Run:
        """See `Ensemble.adapt`: results are outputs and gradients of the inputs."""
        return differentiated(compiled)

    def describe_choice(
        self, reports: Sequence[GraphReport], winner: str, rows: tuple[CandidateReport, ...]
    ) -> None:
        """See `Ensemble.describe_choice`; what "split" chose stands in its reports already."""
        for report in reports:
            if winner != SPLIT:
                report.chosen = winner
            if report.kind != "backward":
                marked = tuple(_of_training(row) for row in rows)
                report.candidates = marked + report.candidates


def differentiated(compiled: Callable[..., Any]) -> Run:
    """A function from inputs to outputs and the gradients of those inputs that require them."""

    def run(args: list[Any]) -> Sequence[Any]:
        leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
        outputs = compiled(*args)
        open_ones = [o for o in outputs if isinstance(o, Tensor) and o.requires_grad]
        plain = [o.detach() if isinstance(o, Tensor) else o for o in outputs]
        if not open_ones:
            return plain
        tangents = [_tangent(o, i) for i, o in enumerate(open_ones)]
        return [*plain, *torch.autograd.grad(open_ones, leaves, tangents, allow_unused=True)]

    return run


def _of_training(row: CandidateReport) -> CandidateReport:
    return replace(row, graph="training")


def _tangent(output: Tensor, number: int) -> Tensor:
    """Returns a gradient to start from, the same for every candidate and dtype."""
    generator = torch.Generator().manual_seed(number)
    with private.disable_current_modes():  # one may be on that knows of no generators but its own
        numbers = torch.randn(output.shape, generator=generator, dtype=torch.float32)
    return numbers.to(output.device, output.dtype)
