"""Runs the calls of a segment: as a program, a few of their results alone, or in eager."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from dynamo_backends.aot.step.backward.tape import Tape, change_tape
from dynamo_backends.aot.step.program.copies import restoring_on_error
from dynamo_backends.aot.step.program.record_program import RecordProgram
from dynamo_backends.aot.step.program.step_programs import StepPrograms
from dynamo_backends.aot.step.record.interpreter import execute, setting_group_numbers
from dynamo_backends.aot.step.record.placeholders import materialize_deferred
from dynamo_backends.aot.step.record.segment import Segment
from dynamo_backends.aot.step.record.trie import Trie
from dynamo_backends.interface.errors import StepCaptureError
from dynamo_backends.runtime.index_checks import OutOfRangeError

log = logging.getLogger("dynamo_backends")


class SegmentRunner:
    """Runs what the sessions of a step have recorded .

    Attributes:
        refusals: Lines from which on the step runs in eager, with the reasons.
    """

    def __init__(self, programs: StepPrograms):
        self.refusals: dict[str, str] = {}
        self._programs = programs
        self._state = programs.state
        self._held: Sequence[int] = ()

    def commit(self, segment: Segment) -> bool:
        """Runs the calls of a segment as a program; False if only eager can."""
        node = segment.node
        if node is segment.trie.root:
            return True
        path = node.path()
        self._held = held = segment.held()
        if not held and not any(entry.mutates or entry.draws for entry in path):
            return True
        outputs = {*held, *_shared_roots(segment.trie, held)}
        program = self._programs.find(segment, path, outputs, pure=False)
        if program is None or program.compiled.prefers_eager:
            self.materialize(segment)
            return False
        tensors = self._run(program, segment)
        if tensors is None:
            return False
        assign(segment, tensors, held)
        return True

    def _run(self, program: RecordProgram, segment: Segment) -> dict[int, Tensor] | None:
        comparison = program.compiled.comparison
        turn, start = None if comparison is None else comparison.next_program, time.perf_counter()
        tensors: dict[int, Tensor] | None = None
        try:
            if comparison is None or turn is not None:
                tensors = program(segment, self._state.inventory)
        except OutOfRangeError:
            with restoring_on_error(self._state.inventory.tensors):
                self.materialize(segment)
            return None
        if tensors is None:
            self.materialize(segment)
        if comparison is not None:
            self._state.synchronize()
            comparison.note_seconds(turn, time.perf_counter() - start)
        return tensors

    def evaluate(self, segment: Segment, numbers: Sequence[int]) -> dict[int, Tensor] | None:
        """Computes a few tensors of a segment and changes nothing; None if only eager can."""
        trie, node = segment.trie, segment.node
        path = node.path()
        written = any(entry.mutates for entry in path)
        found = {
            n: trie.values[n]
            for n in numbers
            if trie.kinds[n] != "result" and not (written and n in node.known)
        }
        wanted = list(dict.fromkeys(n for n in numbers if n not in found))
        if wanted:
            program = self._programs.find(segment, path, wanted, pure=True)
            if program is None:
                return None
            try:
                found |= program(segment, self._state.inventory)
            except OutOfRangeError:
                return None
        return found

    def materialize(self, segment: Segment) -> None:
        """Runs the calls of a segment in eager.

        Raises:
            StepCaptureError: The step is spread over a mesh.
        """
        if self._programs.definition.parallel is not None:
            raise StepCaptureError(
                "a part of the step would run in eager, which is not supported on a mesh. Remove "
                "mesh, or change the step so that it compiles as a whole."
            )
        trie, node = segment.trie, segment.node
        held = segment.held()
        tensors = {n: trie.values[n] for n in node.known if trie.kinds[n] in ("slot", "input")}
        path = node.path()
        change_tape(Tape())  # with which the step goes on
        with setting_group_numbers(self._programs.definition.optimizers, segment.numbers):
            execute(path, tensors, trie.numbers.__getitem__, held)
        segment.become_real(tensors, held)

    def refuse(self, reason: str, line: str) -> None:
        """Notes that a part of the step runs in eager, or raises."""
        text = f"the step {reason} at {line}"
        if self._programs.raises:
            raise StepCaptureError(
                f'{text}, which compile_step does not support. Pass fallback="split" to run the '
                "rest of such a call in eager."
            )
        if line not in self.refusals:
            log.warning("%s. The rest of the step runs in eager.", text[0].upper() + text[1:])
        self.refusals[line] = reason

    def note_value(self, func: Any, line: Callable[[], str]) -> None:
        """Python has asked for contents of a tensor, or for what is outside of the record."""


def _shared_roots(trie: Trie, held: Sequence[int]) -> set[int]:
    """Results that several of those held are views of: these share memory."""
    roots = [trie.aliases[n] for n in held if n in trie.aliases]
    return {n for n in roots if trie.kinds[n] == "result" and roots.count(n) > 1}


def assign(segment: Segment, tensors: dict[int, Tensor], held: list[int]) -> None:
    """Turns the placeholders that user code holds into ordinary tensors.

    Gradients stay the objects they were: `p.grad is g`.

    Args:
        segment: A call whose program has run.
        tensors: Its outputs by their numbers; is emptied.
        held: The placeholders that user code refers to.
    """
    trie = segment.trie
    gradients = {n: target for target, n in segment.gradients.items() if n is not None}
    owners = {n: target for n, target in gradients.items() if trie.kinds[target] != "result"}
    for number in held:
        target = owners.get(number)
        if target is not None:
            owner = trie.values[target]
            tensors.pop(number, None)
            gradient = owner.grad
            materialize_deferred(trie.values[number], gradient)
            del gradient
            owner.grad = trie.values[number]
            continue
        real = view_of(trie, number, tensors, trie.values)
        tensors.pop(number, None)
        materialize_deferred(trie.values[number], real)
        tensors[number] = trie.values[number]
    tensors.clear()
    for number, target in gradients.items():
        if target in held and target not in owners.values():
            trie.values[target].grad = trie.values[number]
    trie.renew(held)


def view_of(trie: Trie, number: int, tensors: Mapping[int, Tensor], others: Any) -> Tensor:
    """Returns a result's tensor, rebuilt as a view where its base lives on.

    Args:
        trie: Trie of the record.
        number: Number of the result.
        tensors: What was computed.
        others: The other tensors of the call, by their numbers.
    """
    root = trie.aliases.get(number)
    base = None
    if root is not None:
        base = tensors.get(root) if trie.kinds[root] == "result" else others[root]
    if base is None:
        return tensors[number].detach()
    assert root is not None
    spec, of_base = trie.specs[number], trie.specs[root]
    if base.stride() != of_base.stride or base.dtype is not spec.dtype:
        return tensors[number].detach()
    offset = spec.offset + int(base.storage_offset()) - of_base.offset
    return base.detach().as_strided(spec.size, spec.stride, offset)
