"""The programs of a step: for each place of its records, found or compiled."""

import itertools
import logging
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_backends.aot.step.mesh.multiprocess import broadcast_initial_state, ranks_of
from dynamo_backends.aot.step.program.backends import StepBackend, step_backend
from dynamo_backends.aot.step.program.mesh_layout import move_written
from dynamo_backends.aot.step.program.optimizer_state import NewStateError, create_state
from dynamo_backends.aot.step.program.record_program import TRACING, RecordProgram
from dynamo_backends.aot.step.program.recording import Definition
from dynamo_backends.aot.step.record.segment import Segment
from dynamo_backends.aot.step.record.trie import Entry, Trie, TrieNode
from dynamo_backends.aot.step.state.arguments import shared_memory
from dynamo_backends.aot.step.state.hyperparameters import OptimizerSettings
from dynamo_backends.aot.step.state.inventory import Inventory
from dynamo_backends.interface.errors import StepCaptureError, StepOperatorError
from dynamo_backends.runtime.device_moves import move_keeping_aliases
from dynamo_backends.runtime.device_values import device_by_name
from dynamo_backends.runtime.residency import device_of_values


class StepState:
    """The parameters, buffers and states of optimizers of a step.

    Attributes:
        backend: What compiles the step.
        ids: Those of the tensors that live on.
    """

    def __init__(self, definition: Definition, backend: str, options: Mapping[str, Any] | None):
        mesh = None if definition.parallel is None else definition.parallel.mesh
        self.backend: StepBackend = step_backend(backend, options, mesh=mesh)
        self.ids: dict[int, Any] = {}
        self._definition = definition
        self._options = options
        self._inventory: Inventory | None = None

    @property
    def inventory(self) -> Inventory:
        """The tensors that live on, with names; after `refresh`."""
        assert self._inventory is not None
        return self._inventory

    def refresh(self) -> tuple[list[tuple[Tensor, Tensor]], bool] | None:
        """Looks for other tensors than there were, and moves them to the backend's devices.

        Returns:
            Tensors, each with the one that has taken its place, and whether these can take that of
            all that were there; None: nothing has changed.

        Raises:
            StepCaptureError: On a mesh an optimizer makes its state in a way of its own.
        """
        before = self._inventory
        if before is not None and before.is_current():
            return None
        self._create_state_on_mesh()
        self._inventory = now = Inventory(self._definition.models, self._definition.optimizers)
        is_like = before is not None and before.is_like(now)
        if before is not None and is_like and all(map(operator.is_, before.tensors, now.tensors)):
            return None
        self._move(now)
        self.ids = dict.fromkeys(map(id, now.tensors))
        if before is None:
            return [], False
        were = dict(zip(before.slots, before.tensors, strict=True))
        pairs = zip(now.slots, now.tensors, strict=True)
        replaced = [(were[slot], t) for slot, t in pairs if were.get(slot, t) is not t]
        return replaced, is_like

    def _create_state_on_mesh(self) -> None:
        """Makes the optimizers' state, as no first step in eager does on a mesh."""
        if self._definition.parallel is None:
            return
        strange = [o for o in self._definition.optimizers if not create_state(o)]
        if strange:
            raise StepCaptureError(
                f"a step on a mesh cannot run in eager, but the state of {strange[0]!r} can only "
                "be created by a first step in eager. Use an optimizer of torch.optim."
            )

    def _move(self, inventory: Inventory) -> None:
        """Moves all that lives on to the backend's devices, if it has some."""
        definition, target = self._definition, self.backend.target
        if definition.parallel is not None and target is not None:
            ranks = ranks_of(definition.parallel)
            if ranks is not None:
                broadcast_initial_state(ranks, definition.parallel, inventory, target.name)
            definition.parallel.settle(inventory, definition.models, definition.optimizers, target)
            return
        found = device_of_values(inventory.tensors)
        if found is not None and self.backend.home is None:
            self.backend = step_backend(self.backend.name, self._options, found)
        home = self.backend.home
        if home is None:
            return
        pairs = zip(inventory.slots, inventory.tensors, strict=True)
        move_keeping_aliases((t for slot, t in pairs if not slot.is_setting), device_by_name(home))

    def synchronize(self) -> None:
        """Waits for the GPU, if the tensors are on one."""
        if any(t.is_cuda for t in self.inventory.tensors):
            torch.cuda.synchronize()


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
        definition: Definition of the step.
        state: What lives on.
        settings: Settings of the optimizers, by their ids.
        raises: Whether what cannot be compiled raises; else it runs in eager.

    Attributes:
        definition: Likewise.
        state: Likewise.
        settings: Likewise.
        raises: Likewise.
        tries: The records, by the state of torch in which they were made.
        compilations: How many graphs were compiled.
        launches: How many executables were launched.
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
        self.compilations = self.launches = 0
        self.reasons: list[str] = []
        self.refusal: StepOperatorError | None = None
        self.definition = definition
        self.state = state
        self.settings = settings
        self.raises = raises
        self._uses = itertools.count()
        self._failed: dict[TrieNode, set[Any]] = {}  # with the arguments that shared memory

    def trie(self, key: Any) -> tuple[Trie, bool]:
        """Returns the record for a state of torch, and whether it is new."""
        trie = self.tries.get(key)
        is_new = trie is None or trie.is_full
        if trie is None or is_new:
            trie = self.tries[key] = Trie()
        return trie, is_new

    @property
    def kept(self) -> Iterator[RecordProgram]:
        """Yields the programs that are kept."""
        return (program for node in self._places() for program, _ in node.programs)

    def _all_tries(self) -> Iterator[Trie]:
        tries = list(self.tries.values())
        while tries:
            trie = tries.pop()
            yield trie
            tries += [node.then for node in trie.root.subtree() if node.then is not None]

    def _places(self) -> Iterator[TrieNode]:
        return itertools.chain.from_iterable(t.root.subtree() for t in self._all_tries())

    def rebind(self, replaced: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Puts the tensors that live on now in the places of earlier ones."""
        for trie in self._all_tries() if replaced else ():
            for old, new in replaced:
                trie.rebind(old, new)

    def forget(self) -> None:
        """Lets go of all programs; the records stay."""
        for trie in self._all_tries():
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
                program.last_used = next(self._uses)
                return program
        if node in self._failed and _sharing(segment, path) in self._failed[node]:
            return None
        if len(node.programs) >= MAX_PROGRAMS:
            reason = (
                f"a code path of the step was compiled {MAX_PROGRAMS} times, and no compiled "
                "program fits this call."
            )
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
            log.warning("%s The step runs in eager for such calls.", reason)

    def compile(
        self,
        segment: Segment,
        path: Sequence[Entry],
        outputs: Sequence[int],
        pure: bool,
        inputs: Any = None,
    ) -> RecordProgram:
        """Compiles a program for the way to a place; see `RecordProgram`."""
        parallel, target = self.definition.parallel, self.state.backend.target
        if parallel is not None and target is not None and not pure:
            move_written(segment, path, parallel, target)
        with TRACING:
            program = RecordProgram(
                self,
                self.state.backend,
                self.state.inventory,
                segment,
                path,
                outputs,
                pure,
                inputs,
            )
        program.last_used = next(self._uses)
        if self.compilations:
            self.reasons.append(_OTHER_WAY if inputs is None else _OTHER_ORDER)
        self.compilations += 1
        return program

    def _drop_oldest(self) -> None:
        """Keeps the number of programs within bounds."""
        programs = [(node, p) for node in self._places() for p, _ in node.programs]
        programs.sort(key=lambda each: each[1].last_used)
        for node, oldest in programs[:-MAX_VARIANTS]:
            node.programs[:] = [each for each in node.programs if each[0] is not oldest]


def _sharing(segment: Segment, path: Sequence[Entry]) -> Any:
    """Returns which inputs of a call share memory: other programs are compiled where others do."""
    trie = segment.trie
    numbers = sorted({n for e in path for n in e.mentioned() if trie.kinds[n] == "input"})
    return shared_memory([trie.values[n] for n in numbers])
