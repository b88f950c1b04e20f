"""Compares a step of a compiled program with the step's graph in eager.

A program may write over its inputs, so eager goes first and what will be updated is copied. What is
compared of an update is how it changed the contents: an update by a small learning rate is small
beside what it is added to, and a wrong gradient must not hide there.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_backends.aot.step.program.copies import TensorBackups
from dynamo_backends.aot.step.program.programs import CopyingProgram, is_borrowed
from dynamo_backends.graph.aliasing import tensor_bytes
from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface.executable import StepProgram
from dynamo_backends.interface.report import GraphReport
from dynamo_backends.runtime.atomic_copies import copy_atomically
from dynamo_backends.runtime.eager_switch import EagerSwitch
from dynamo_backends.verify.comparator import Comparator
from dynamo_backends.verify.first_call import (
    described_region,
    run_comparison_part,
    why_not_repeatable,
)
from dynamo_backends.verify.mismatch import describe_layout_mismatch, is_inexact
from dynamo_backends.verify.reference import EagerInterpreter

_KEPT = 1 << 25  # bytes of eager's results; of more a sample is kept
_OF_THE_CHANGE = 1e2  # times the typical change is as telling as 1 is by the rule
_ROUNDING = 2e4  # times its rounding is as telling as 1 is by the rule


class VerifiedStep(StepProgram):
    """A program whose next step is compared with eager.

    Args:
        program: Compiled.
        graph: What it was compiled of; not changed.
        report: Report of the graph.
        settle: Gets the program that is to take the steps from now on.
        always: Every step is compared.
        strict: What is wrong raises.
        reduced: Whether the user admits bfloat16.
    """

    def __init__(
        self,
        program: StepProgram,
        graph: Graph,
        report: GraphReport,
        settle: Callable[[StepProgram], None],
        always: bool = False,
        strict: bool = False,
        reduced: bool = False,
    ):
        self._program = program
        self._graph = graph
        self._report = report
        self._settle = settle
        self._always = always
        self._strict = strict
        self._reduced = reduced
        self.from_disk = program.from_disk

    @property
    def compiled(self) -> StepProgram:
        """The program that is compared."""
        return self._program

    @property
    def launches(self) -> int:  # type: ignore[override]
        """See `StepProgram`."""
        return self._program.launches

    def outputs(self, taken: list[Any]) -> list[Tensor]:
        """See `StepProgram.outputs`."""
        return self._program.outputs(taken)

    def __call__(self, inputs: Sequence[Tensor], taken: list[Any]) -> None:
        """See `StepProgram.__call__`.

        Raises:
            VerificationError: It is wrong, and must not fall back. The step is taken, by eager.
        """
        comparison = StepComparison(self._graph, inputs, self._reduced)
        try:
            self._compare(comparison, inputs, taken)
        finally:
            comparison.close()

    def _compare(
        self, comparison: "StepComparison", inputs: Sequence[Tensor], taken: list[Any]
    ) -> None:
        comparison.prepare()
        self._program(inputs, taken)
        wrong = comparison.judge(self._program.outputs(taken))
        self._report.note_comparison(comparison.seconds, comparison.unverified)
        if not wrong:
            if not self._always:
                self._settle(self._program)
            return
        module = self._graph.module
        eager = CopyingProgram(self._graph, lambda given: module.forward(*given))
        comparison.restore()
        taken.clear()
        eager(inputs, taken)
        eager.launches = self.launches
        switch = EagerSwitch(eager, [self._report], "step", allowed=not self._strict)
        where = described_region(self._graph)
        switch.switch_after_mismatch(f"{wrong} ({where})", ". The step ran in eager instead.")
        eager.prefers_eager = True
        self._program = eager
        self._settle(eager)


class StepComparison:
    """One step, in eager and compiled.

    Attributes:
        unverified: Why it could not be compared; empty: it was.
        seconds: What the comparison took, without the compiled step.
    """

    def __init__(self, graph: Graph, inputs: Sequence[Tensor], reduced: bool):
        self._graph = graph
        self._inputs = inputs
        self._reduced = reduced
        self._updated = [i for i, x in enumerate(graph.inputs) if x.updated_by is not None]
        self._before: dict[int, Tensor] = {}  # samples
        self._copies: TensorBackups | None = None
        self._expected: dict[int, Any] = {}
        self._stride = 1
        self.unverified = next(filter(None, map(why_not_repeatable, graph.calls)), "")
        self.seconds = 0.0

    def prepare(self) -> None:
        """Takes the step in eager, apart; to be called before the compiled one is taken."""
        if self.unverified:
            return
        start = time.perf_counter()
        size = sum(tensor_bytes(self._inputs[i]) for i in self._updated)
        self._stride = max(1, math.ceil(size / _KEPT))
        self._guarded(self._run_eager)
        self.seconds += time.perf_counter() - start

    def _run_eager(self) -> None:
        self._copies = TensorBackups({i: self._inputs[i].detach() for i in self._updated})
        self._before = {
            i: self._sampled(place, self._inputs[i].detach()).clone()
            for place, i in enumerate(self._updated)
        }
        EagerInterpreter(self._graph.module)(self._inputs, self._keep)

    def judge(self, outputs: Sequence[Any]) -> str:
        """Returns what is wrong with the compiled step, in words; empty: nothing."""
        if self.unverified:
            return ""
        start = time.perf_counter()
        results = [*(self._inputs[i].detach() for i in self._updated), *outputs]
        found: list[str] = []
        self._guarded(lambda: found.append(self._compare(results)))
        self.seconds += time.perf_counter() - start
        return "" if self.unverified else found[0]

    def restore(self) -> None:
        """Makes the step undone."""
        assert self._copies is not None
        before = self._copies.load()
        targets = [self._inputs[i].detach() for i in self._updated]
        copy_atomically(
            targets, [before[i].to(self._inputs[i].device) for i in self._updated], [], None
        )

    def close(self) -> None:
        """Lets go of what was copied."""
        if self._copies is not None:
            self._copies.close()

    def _keep(self, place: int, value: Any) -> None:
        value = self._sampled(place, value)
        borrowed = isinstance(value, Tensor) and is_borrowed(self._graph.outputs[place])
        self._expected[place] = value.clone() if borrowed else value

    def _sampled(self, place: int, value: Any) -> Any:
        """Returns every so manieth slice of what is updated, with the last one."""
        if self._stride == 1 or place >= len(self._updated) or not value.dim():
            return value
        longest = max(range(value.dim()), key=lambda d: value.shape[d])
        first = (value.shape[longest] - 1) % self._stride
        part = value[(slice(None),) * longest + (slice(first, None, self._stride),)]
        return part.clone()

    def _compare(self, results: Sequence[Any]) -> str:
        if len(results) != len(self._expected):
            return f"{len(results)} results instead of {len(self._expected)}"
        module, reduced = self._graph.module, self._reduced
        comparator = Comparator(module, self._inputs_before, reduced, self._view)
        for place, result in enumerate(results):
            expected, found = self._expected[place], self._sampled(place, result)
            # What is updated keeps its strides.
            promised = found.stride() if place < len(self._updated) else self._promised(place)
            text = describe_layout_mismatch(expected, found, promised)
            if text is not None:
                return f"{self._name(place)} {text}"
            if isinstance(expected, Tensor):
                comparator.add_output(
                    place, self._change(place, expected), self._change(place, found)
                )
        wrong = comparator.find_mismatch()
        if wrong is None:
            return ""
        place, text = wrong
        if self._scale(place) == 1.0:
            return f"{self._name(place)} {text}"
        return f"{self._name(place)} {text} (relative to 100 times its typical update)"

    def _view(self, place: int, value: Tensor) -> Tensor:
        """Returns what is compared of a result of a replay."""
        return self._change(place, self._sampled(place, value))

    def _inputs_before(self) -> list[Any]:
        """The inputs as they were before the step was taken."""
        assert self._copies is not None
        before = {i: x.to(self._inputs[i].device) for i, x in self._copies.load().items()}
        return [before.get(i, x) for i, x in enumerate(self._inputs)]

    def _promised(self, place: int) -> tuple[int, ...] | None:
        value = getattr(self._graph.outputs[place], "meta", {}).get("val")
        return tuple(value.stride()) if isinstance(value, Tensor) else None

    def _name(self, place: int) -> str:
        if place < len(self._updated):
            return f"the update of {self._graph.inputs[self._updated[place]].name}"
        return f"output {place - len(self._updated)}"

    def _change(self, place: int, value: Tensor) -> Tensor:
        """Returns what to compare of a result: of an update, the scaled change."""
        if place >= len(self._updated) or not is_inexact(value):
            return value
        before = self._before[self._updated[place]].to(value.dtype)
        return (value - before) / self._scale(place)

    def _scale(self, place: int) -> float:
        if place >= len(self._updated):
            return 1.0
        expected = self._expected[place]
        if not is_inexact(expected) or not expected.numel():
            return 1.0
        before = self._before[self._updated[place]]
        typical = float((expected - before).abs().double().square().mean().sqrt())
        numbers = torch.finfo(expected.dtype)  # denormal ones are zeros, or have few digits
        rounding = max(numbers.eps * float(expected.abs().max()), numbers.tiny)
        scale = min(1.0, max(_OF_THE_CHANGE * typical, _ROUNDING * rounding))
        return scale if scale > 0 and math.isfinite(scale) else 1.0

    def _guarded(self, action: Callable[[], None]) -> None:
        """Runs a part of the comparison; notes why it failed, if it did."""
        # As real steps are taken: some operators leave their gradient more in grad mode.
        self.unverified = run_comparison_part(action, torch.enable_grad)
