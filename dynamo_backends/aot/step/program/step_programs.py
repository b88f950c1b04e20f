"""The programs of a step: for each place of its records, found or compiled."""

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from dynamo_backends.aot.step.program.optimizers import NewStateError
from dynamo_backends.aot.step.program.record_program import RecordProgram
from dynamo_backends.aot.step.program.recording import Definition
from dynamo_backends.aot.step.program.step_state import StepState
from dynamo_backends.aot.step.program.variant import TRACING, Variant
from dynamo_backends.aot.step.record.mesh_batch import move_written
from dynamo_backends.aot.step.record.segment import Segment
from dynamo_backends.aot.step.record.trie import Entry, Node, Trie
from dynamo_backends.aot.step.state.arguments import shared_memory
from dynamo_backends.aot.step.state.hyperparameters import OptimizerSettings
from dynamo_backends.interface.errors import StepCaptureError, StepOperatorError

log = logging.getLogger("dynamo_backends")

MAX_PROGRAMS = 8
"""The number of programs that one place of a record may have."""

MAX_VARIANTS = 64
"""The number of programs that a step keeps; the least recently used one goes first."""

_OTHER_WAY = "another way through the step, or other tensors that are kept"
_OTHER_ORDER = "a file has the arguments in their order"


class StepPrograms:
    """The records of a step, and what was compiled of them.

    Args:
        definition: Of the step.
        state: What lives on.
        settings: Of the optimizers, by their ids.
        raises: Whether what cannot be compiled raises; else it runs in eager.

    Attributes:
        definition: Likewise.
        state: Likewise.
        settings: Likewise.
        raises: Likewise.
        tries: The records, by the state of torch in which they were made.
        compilations: How many graphs were compiled.
        reasons: Why each of them but the first was compiled.
        refusal: Why the backend can compile nothing, if that is so.
    """

    def __init__(
        self,
        definition: Definition,
        state: StepState,
        settings: Mapping[int, OptimizerSettings],
        raises: bool,
    ):
        self.tries: dict[Any, Trie] = {}
        self.compilations = 0
        self.reasons: list[str] = []
        self.refusal: StepOperatorError | None = None
        self.definition = definition
        self.state = state
        self.settings = settings
        self.raises = raises
        self._retired_launches = 0
        self._uses = itertools.count()
        self._failed: dict[Node, set[Any]] = {}  # with the arguments that shared memory

    def trie(self, key: Any) -> tuple[Trie, bool]:
        """Returns the record for a state of torch, and whether it is new."""
        trie = self.tries.get(key)
        is_new = trie is None or trie.is_full
        if trie is None or is_new:
            self._retired_launches += 0 if trie is None else trie.launches
            trie = self.tries[key] = Trie()
        return trie, is_new

    @property
    def launches(self) -> int:
        """Counts launched executables."""
        return self._retired_launches + sum(trie.launches for trie in self.tries.values())

    @property
    def variants(self) -> Iterator[Variant]:
        """Yields the programs that are kept."""
        return (program.variant for node in self._places() for program, _ in node.programs)

    def _all_tries(self) -> Iterator[Trie]:
        tries = list(self.tries.values())
        while tries:
            trie = tries.pop()
            yield trie
            tries += [node.then for node in trie.root.subtree() if node.then is not None]

    def _places(self) -> Iterator[Node]:
        return itertools.chain.from_iterable(t.root.subtree() for t in self._all_tries())

    def rebind(self, replaced: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Puts the tensors that live on now in the places of earlier ones."""
        for trie in self._all_tries() if replaced else ():
            for old, new in replaced:
                trie.rebind(old, new)

    def forget(self) -> None:
        """Lets go of all programs; the records stay."""
        self._retired_launches = self.launches
        for trie in self._all_tries():
            trie.retired = 0
            for node in trie.root.subtree():
                node.programs.clear()
        self._failed.clear()

    def find(
        self,
        segment: Segment,
        path: Sequence[Entry],
        outputs: Iterable[int],
        pure: bool,
    ) -> RecordProgram | None:
        """Returns a program for the way to a place; compiles one if need be.

        Args:
            segment: A call that went this way.
            path: Its calls.
            outputs: The numbers of the tensors that are needed.
            pure: Nothing but these is to be computed, and nothing to be changed.

        Returns:
            None: only eager can take this way.

        Raises:
            StepCaptureError: It cannot be compiled, and that raises.
        """
        wanted, node = set(outputs), segment.node
        for program, is_pure in node.programs:
            is_enough = is_pure is pure and wanted.issubset(program.outputs)
            if is_enough and program.holds(segment, self.state.inventory):
                program.variant.last_used = next(self._uses)
                return program
        if node in self._failed and _sharing(segment, path) in self._failed[node]:
            return None
        if len(node.programs) >= MAX_PROGRAMS:
            reason = f"{MAX_PROGRAMS} programs for one way through a step did not serve."
            self._fail(segment, path, StepCaptureError(reason))
            return None
        try:
            program = self.compile(segment, path, sorted(wanted), pure)
        except NewStateError:
            return None  # it is there at the next call
        except StepCaptureError as error:
            if self.raises:
                raise
            self._fail(segment, path, error)
            return None
        node.programs.append((program, pure))
        self._drop_oldest()
        return program

    def _fail(self, segment: Segment, path: Sequence[Entry], reason: StepCaptureError) -> None:
        self._failed.setdefault(segment.node, set()).add(_sharing(segment, path))
        if isinstance(reason, StepOperatorError) and not self.compilations:
            self.refusal = reason
        else:
            log.warning("%s The step runs in eager there.", reason)

    def compile(
        self,
        segment: Segment,
        path: Sequence[Entry],
        outputs: Sequence[int],
        pure: bool,
        inputs: Any = None,
    ) -> RecordProgram:
        """Compiles a program for the way to a place; see `RecordProgram`."""
        backend, inventory = self.state.backend, self.state.inventory
        parallel, target = self.definition.parallel, backend.target
        if parallel is not None and target is not None and not pure:
            move_written(segment, path, parallel, target)
        with TRACING:
            program = RecordProgram(
                self.definition, backend, inventory, segment, path, outputs, pure,
                self.settings, inputs,
            )  # fmt: skip
        program.variant.last_used = next(self._uses)
        if self.compilations:
            self.reasons.append(_OTHER_WAY if inputs is None else _OTHER_ORDER)
        self.compilations += 1
        return program

    def _drop_oldest(self) -> None:
        """Keeps the number of programs within bounds."""
        programs = [(node, p) for node in self._places() for p, _ in node.programs]
        programs.sort(key=lambda each: each[1].variant.last_used)
        for node, oldest in programs[:-MAX_VARIANTS]:
            self._retired_launches += oldest.variant.program.launches
            node.programs[:] = [each for each in node.programs if each[0] is not oldest]


def _sharing(segment: Segment, path: Sequence[Entry]) -> Any:
    """Returns which inputs of a call share memory: other programs are compiled where others do."""
    trie = segment.trie
    numbers = sorted({n for e in path for n in e.mentioned() if trie.kinds[n] == "input"})
    return shared_memory([trie.values[n] for n in numbers])
