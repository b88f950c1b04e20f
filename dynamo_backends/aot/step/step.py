"""A compiled training step: its Python runs at every call, its torch calls are compiled."""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dynamo_backends._torch_private.placeholders import function_mode_depth, pop_function_modes
from dynamo_backends.aot.step.backward.tape import Tape, change_tape
from dynamo_backends.aot.step.microbatches import StepCall
from dynamo_backends.aot.step.program.backends import TORCHS
from dynamo_backends.aot.step.program.copies import all_or_nothing
from dynamo_backends.aot.step.program.lowering import RecordProgram
from dynamo_backends.aot.step.program.recording import Definition
from dynamo_backends.aot.step.program.step_programs import StepPrograms
from dynamo_backends.aot.step.program.step_state import StepState
from dynamo_backends.aot.step.record.active_session import active_session
from dynamo_backends.aot.step.record.interpreter import execute, group_numbers_as
from dynamo_backends.aot.step.record.mesh_batch import WholeBatch
from dynamo_backends.aot.step.record.patches import Patches, is_one_entry
from dynamo_backends.aot.step.record.results import assign
from dynamo_backends.aot.step.record.segment import Segment
from dynamo_backends.aot.step.record.session import Session
from dynamo_backends.aot.step.record.trie import Trie, process_state
from dynamo_backends.aot.step.saving import (
    ANOTHER,
    LastCall,
    Parameters,
    parameters_of,
    program_snapshot,
    result_template,
    settings_changed,
)
from dynamo_backends.aot.step.snapshot import Snapshot
from dynamo_backends.aot.step.state.arguments import flatten_batch
from dynamo_backends.aot.step.state.settings import OptimizerSettings
from dynamo_backends.aot.step.state.unsupported_hooks import outside_effect
from dynamo_backends.interface.compiler import compiler
from dynamo_backends.interface.errors import SaveError, StepCaptureError, StepDeviceError
from dynamo_backends.interface.publishing import (
    NO_OPERATORS,
    publish_uncaptured,
    uncaptured_error,
)
from dynamo_backends.interface.registry import load
from dynamo_backends.interface.report import GraphReport
from dynamo_backends.runtime.foreign import refuse_step
from dynamo_backends.runtime.position_checks import OutOfRangeError

log = logging.getLogger("dynamo_backends")

_SAVING = "dynamo_backends.package.steps.saving:save_step"  # of a higher layer

MANY = 16  # calls that go another way at one line: worth a warning


class Step:
    """A compiled training step; call it like the function.

    The function runs at every call. Its torch calls are compared with a record, and compiled.

    Args:
        definition: What to compile.
        backend: The name of what compiles it.
        options: Of the backend.
        fallback: "error" or "split": what becomes of parts that cannot be compiled.

    Attributes:
        eager_steps: How many steps ran in eager: because they went a new way, which is recorded in
            eager, or because autotune compared eager, or chose it. Steps that `torch.compile` runs
            in parts do not count (see `is_split`).
        cuts: At how many places the last call needed a value in the middle.
        divergences: The lines at which calls went another way than all before.
        refusals: Parts that run in eager, with the reason.

    Raises:
        StepCaptureError: A model or optimizer can be part of no program, and `fallback` is "error".
    """

    def __init__(
        self,
        definition: Definition,
        backend: str,
        options: Mapping[str, Any] | None,
        fallback: str,
    ):
        self.eager_steps = 0
        self.cuts = 0
        self.divergences: list[str] = []
        self.refusals: dict[str, str] = {}
        self._definition = definition
        self._options = options
        self._fallback = fallback
        self._settings = {id(o): OptimizerSettings(o) for o in definition.optimizers}
        self._state = StepState(definition, backend, options)
        self._programs = StepPrograms(
            definition, self._state, self._settings, raises=fallback == "error"
        )
        self._patches = Patches(definition.optimizers)
        self._split: Callable[..., Any] | None = None
        self._is_checked = False
        self._lock = threading.RLock()
        self._last: LastCall | None = None
        self._held: Sequence[int] = ()
        reason = outside_effect(definition.models, definition.optimizers)
        if reason is not None:
            self._compile_parts(StepCaptureError(reason))

    def _compile_parts(self, error: StepCaptureError) -> None:
        """Hands the function to `torch.compile`, or raises if parts are not wanted."""
        if self._fallback == "error":
            raise error
        log.warning('%s torch.compile runs the step in parts (fallback="split").', error)
        name, backend = self._state.backend.name, None
        if name not in TORCHS:
            backend = compiler(name, **(self._options or {}))
        self._split = torch.compile(self._definition.function, backend=backend or name)
        self.refusals[""] = str(error)

    def __reduce__(self) -> tuple[Any, ...]:
        """Refuses copies and pickles.

        Raises:
            TypeError: Always; the message says what to do.
        """
        raise TypeError(
            "a compiled step can be neither copied nor pickled: it is bound to its model and "
            "optimizer. Copy those, and call dynamo_backends.compile_step for the copies."
        )

    @property
    def compilations(self) -> int:
        """Counts the graphs that were compiled."""
        return self._programs.compilations

    @property
    def reasons(self) -> list[str]:
        """Why each of them but the first was compiled."""
        return self._programs.reasons

    @property
    def recompiles(self) -> int:
        """Counts the graphs that were compiled after the first."""
        return max(0, self.compilations - 1)

    @property
    def is_split(self) -> bool:
        """Returns whether `torch.compile` runs the step in parts: no program can hold it."""
        return self._split is not None

    @property
    def reports(self) -> list[GraphReport]:
        """One for each compiled graph that is kept; of a step on a mesh they say what is where."""
        return [variant.report for variant in self._programs.variants]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Takes one step.

        Returns:
            What the function returns; tensors in it are detached.

        Raises:
            StepCaptureError: A part of it cannot be compiled, and `fallback` is "error".
            RankError: Another process of the mesh has ended, is suspended or does something else.
        """
        if active_session() is not None:
            return self._definition.function(*args, **kwargs)  # a step within a step
        with self._lock:
            if self._split is None:
                self._refresh()
            if self._split is None:
                result = self._call(args, kwargs)
                if self._programs.refusal is not None:
                    self._compile_parts(self._programs.refusal)
                return result
            result = self._accumulated(self._split, None, args, kwargs)
            return pytree.tree_map_only(Tensor, _detached, result)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the step into one file, from which `load_step` makes a callable step.

        What is written is the program of the last call, with parameters, buffers, optimizer state
        and numbers such as the learning rate as they are now. A loaded step runs no Python of the
        function.

        Args:
            path: Of the file; it is replaced if it exists.

        Raises:
            SaveError: No step was taken yet, or it does what a file cannot hold.
        """
        write: Callable[[Any, Snapshot], None] = load(_SAVING)
        write(path, self.snapshot())

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._follow(args, kwargs)

    def _follow(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the function, and follows its torch calls."""
        session, given = self._session(args, kwargs)
        modes = function_mode_depth()
        try:
            self._patches.enter(session)
            session.__enter__()
            result = self._run_function(session, *given.pop())
            pop_function_modes(modes)
            self._patches.exit()
            self._before_programs(session, result)
            returned = self._template(session, result)
            self._held, is_followed = (), session.following
            session.finish()
        except BaseException:
            session.abandon()
            raise
        finally:  # a signal may have come in between
            pop_function_modes(modes)
            self._patches.exit()
        self.cuts = session.cuts
        if session.divergence:
            self._note_divergence(session.divergence)
        if session.executed:
            self.eager_steps += 1
        else:
            self._check_that_something_was_compiled()
        if self._definition.parallel is not None:
            return result
        segment, last = session.segment, self._last
        before = last.segment if last is not None and last.segment.trie is segment.trie else None
        self._last = LastCall(
            segment, before, (args, kwargs), returned,
            None if session.executed else self._held, is_followed,
        )  # fmt: skip
        if session.executed:
            detached: dict[int, Tensor] = {}  # a tensor may be there twice
            result = pytree.tree_map_only(
                Tensor, lambda x: detached.setdefault(id(x), _detached(x)), result
            )
        return result

    def _check_that_something_was_compiled(self) -> None:
        """Says so if no operator was compiled at the first call that is followed to its end."""
        if self._is_checked:
            return
        self._is_checked = True
        calls = (node.target for v in self._programs.variants for node in v.graph.calls)
        if self.eager_steps > 1 or any(f is not torch.ops.aten.alias.default for f in calls):
            return
        backend, function = self._state.backend, self._definition.function
        name = str(getattr(function, "__qualname__", type(function).__name__))
        if backend.strict:
            raise uncaptured_error(backend.name, name, NO_OPERATORS)
        publish_uncaptured(GraphReport(backend.name, "step"), name, NO_OPERATORS)

    def _before_programs(self, session: Session, result: Any) -> None:
        """The function has returned, and its last program has not run."""

    def _session(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Session, list[Any]]:
        """A session for a call, and in a list, which is to be emptied, what the function gets."""
        parallel = self._definition.parallel
        state = (*process_state(), self._state.inventory.requires_grad())
        if parallel is None:
            trie, _ = self._programs.trie(state)
            return Session(trie, self._state.ids, self, self._settings), [(args, kwargs)]
        if not parallel.mesh.of_ranks:
            parallel.check_batch(flatten_batch((args, kwargs))[0])
            trie, _ = self._programs.trie(state)
            given = args, kwargs
            session = Session(trie, self._state.ids, self, self._settings, True, given)
            return session, [given]
        batch = WholeBatch(parallel, (args, kwargs))
        trie, is_new = self._programs.trie((*state, batch.kind))
        if is_new:
            batch.begin(trie)
        session = Session(trie, self._state.ids, self, self._settings, is_abstract=True)
        session.segment.parts = batch.parts(trie)
        return session, [batch.arguments(trie)]

    @property
    def launches(self) -> int:
        """Counts launched executables: one per step, and one more at each cut."""
        return self._programs.launches

    def _template(self, session: Session, result: Any) -> Any:
        is_spread = self._definition.parallel is not None
        return None if is_spread else result_template(session.segment, result)

    def _note_divergence(self, line: str) -> None:
        self.divergences = [*self.divergences[1 - MANY :], line]
        if self.divergences.count(line) == MANY:
            log.warning(
                "A step has gone another way than all calls before it %d times, at %s: such calls "
                "run in eager. Pass what changes at each step as a tensor or a float.", MANY, line,
            )  # fmt: skip
            self.divergences.clear()

    def _run_function(self, session: Session, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls the function in a session; after an exception the state is that of eager."""
        function = self._definition.function
        try:
            return self._accumulated(function, session.share_memory, args, kwargs)
        except StepCaptureError:
            raise
        except Exception:
            try:
                session.catch_up()
            except Exception as earlier:
                raise earlier from None  # eager would not have come to the other one
            raise

    def _accumulated(
        self,
        function: Callable[..., Any],
        share_memory: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Calls the user's function, for each part of the batch if it is accumulated."""
        definition = self._definition
        if definition.accumulate == 1:
            return function(*args, **kwargs)
        call = StepCall(
            definition.optimizers,
            definition.models,
            definition.accumulate,
            share_memory,
        )
        return call(function, args, kwargs)

    def snapshot(self) -> Snapshot:
        """Returns the program of the last call, and what lives from step to step as it is now.

        Raises:
            SaveError: See `save`.
        """
        call = self._last
        if self._definition.parallel is not None:
            raise SaveError("the step cannot be saved: it is spread over a mesh.")
        if self.is_split:
            raise SaveError("the step cannot be saved: torch.compile runs it in parts.")
        if call is None:
            raise SaveError("there is no compiled step; take one, and save it then.")
        with self._lock:
            self._refresh()
            return self._snapshot(call)

    def _snapshot(self, call: LastCall) -> Snapshot:
        segment, inventory = call.segment, self._state.inventory
        path = segment.node.path()
        if not call.is_followed:
            line, reason = next(iter(self.refusals.items()), ("", "runs in eager"))
            raise SaveError(f"the step cannot be saved: it {reason}" + f", at {line}." * bool(line))
        strange = next((o for o in self._definition.optimizers if not is_one_entry(o)), None)
        if strange is not None:
            raise SaveError(
                f"the step cannot be saved: {type(strange).__name__} is no optimizer of "
                "torch.optim, and its numbers are constants of the program."
            )
        given = parameters_of(call, inventory)
        if settings_changed(path, self._settings):
            raise SaveError(ANOTHER.format("a setting in an optimizer's param_groups changed"))
        program = self._program_of_file(segment, path, given)
        why_not = program.why_not_next(inventory)
        if why_not is not None:
            raise SaveError(ANOTHER.format(why_not))
        return program_snapshot(
            program, call, given, self._definition, self._state.backend, self._options or {},
            inventory,
        )  # fmt: skip

    def _program_of_file(self, segment: Segment, path: Any, given: Parameters) -> RecordProgram:
        programs = (program for program, is_pure in segment.node.programs if not is_pure)
        for program in programs:
            is_enough = set(given.outputs).issubset(program.outputs)
            if program.inputs == given.numbers and is_enough and not program.has_views:
                return program
        inputs = given.numbers, given.tensors
        try:
            program = self._programs.compile(segment, path, given.outputs, False, inputs)
        except StepCaptureError as error:
            raise SaveError(f"the step cannot be saved: {error}") from error
        if None not in given.numbers:
            segment.node.programs.append((program, False))
        return program

    def _refresh(self) -> None:
        """Looks for other parameters, buffers and states than there were."""
        change = self._state.refresh()
        if change is not None:
            try:
                backend = self._state.backend
                refuse_step(self._state.tensors, backend.name, backend.home)
            except StepDeviceError as error:
                self._compile_parts(error)
            if not change.is_like:
                self._forget_programs()
            self._programs.rebind(change.replaced)

    def _forget_programs(self) -> None:
        self._programs.forget()

    # What a session has run

    def commit(self, segment: Segment) -> bool:
        """See `Runner.commit`."""
        node = segment.node
        if node is segment.trie.root:
            return True
        path = node.path()
        self._held = held = segment.held()
        if not held and not any(entry.mutates or entry.draws for entry in path):
            return True
        outputs = {*held, *_shared_roots(segment.trie, held)}
        program = self._programs.find(segment, path, outputs, pure=False)
        if program is None or program.variant.program.prefers_eager:
            self.materialize(segment)
            return False
        tensors = self._run(program, segment)
        if tensors is None:
            return False
        assign(segment, tensors, held)
        return True

    def _run(self, program: RecordProgram, segment: Segment) -> dict[int, Tensor] | None:
        comparison = program.variant.program.comparison
        turn, start = None if comparison is None else comparison.turn, time.perf_counter()
        tensors: dict[int, Tensor] | None = None
        try:
            if comparison is None or turn is not None:
                tensors = program(segment, self._state.inventory)
        except OutOfRangeError:
            with all_or_nothing(self._state.inventory.tensors):
                self.materialize(segment)
            return None
        if tensors is None:
            self.materialize(segment)
        if comparison is not None:
            self._state.synchronize()
            comparison.note(turn, time.perf_counter() - start)
        return tensors

    def evaluate(self, segment: Segment, numbers: Sequence[int]) -> dict[int, Tensor] | None:
        """See `Runner.evaluate`."""
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
        """See `Runner.materialize`.

        Raises:
            StepCaptureError: The step is spread over a mesh.
        """
        if self._definition.parallel is not None:
            raise StepCaptureError(
                "a part of the step would have to run in eager, which no step on a mesh can."
            )
        trie, node = segment.trie, segment.node
        held = segment.held()
        tensors = {n: trie.values[n] for n in node.known if trie.kinds[n] in ("slot", "input")}
        path = node.path()
        change_tape(Tape())  # with which the step goes on
        with group_numbers_as(self._definition.optimizers, segment.numbers):
            execute(path, tensors, trie.numbers.__getitem__, held)
        segment.become_real(tensors, held)

    def refuse(self, reason: str, line: str) -> None:
        """See `Runner.refuse`."""
        text = f"the step {reason} at {line}"
        if self._fallback == "error":
            raise StepCaptureError(
                f'{text}, which no program of a step holds yet. Pass fallback="split" to run the '
                "rest of such a call in eager."
            )
        if line not in self.refusals:
            log.warning("%s: from there on it runs in eager.", text.capitalize())
        self.refusals[line] = reason

    def note_value(self, func: Any, line: Callable[[], str]) -> None:
        """See `Runner.note_value`."""


def _shared_roots(trie: Trie, held: Sequence[int]) -> set[int]:
    """Results that several of those held are views of: these share memory."""
    roots = [trie.aliases[n] for n in held if n in trie.aliases]
    return {n for n in roots if trie.kinds[n] == "result" and roots.count(n) > 1}


def _detached(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_leaf else tensor.detach()
