"""A compiled training step: its Python runs at every call, its torch calls are compiled."""

import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dynamo_backends._torch_private.pending_tensors import function_mode_depth, pop_function_modes
from dynamo_backends.aot.step.accumulation import StepCall
from dynamo_backends.aot.step.program.backends import TORCHS
from dynamo_backends.aot.step.program.mesh_layout import GlobalBatch
from dynamo_backends.aot.step.program.recording import Definition
from dynamo_backends.aot.step.program.step_programs import StepPrograms, StepState
from dynamo_backends.aot.step.record.patches import Patches, active_session
from dynamo_backends.aot.step.record.session import Session
from dynamo_backends.aot.step.record.trie import process_state
from dynamo_backends.aot.step.runner import SegmentRunner
from dynamo_backends.aot.step.saving import (
    LastCall,
    Snapshot,
    result_template,
    snapshot_of,
)
from dynamo_backends.aot.step.state.arguments import flatten_batch
from dynamo_backends.aot.step.state.hyperparameters import OptimizerSettings
from dynamo_backends.aot.step.state.unsupported_hooks import outside_effect
from dynamo_backends.interface.compiler import compiler
from dynamo_backends.interface.errors import SaveError, StepCaptureError, StepDeviceError
from dynamo_backends.interface.publishing import (
    NO_OPERATORS,
    publish_nothing_compiled,
    uncaptured_error,
)
from dynamo_backends.interface.registry import import_attribute
from dynamo_backends.interface.report import GraphReport
from dynamo_backends.runtime.foreign_devices import refuse_foreign_step

log = logging.getLogger("dynamo_backends")

_SAVING = "dynamo_backends.package.steps.saving:save_step"  # of a higher layer

MANY = 16  # calls that go another way at one line: worth a warning


class Step(SegmentRunner):
    """A compiled training step; call it like the function.

    The function runs at every call. Its torch calls are compared with a record, and compiled.

    Args:
        definition: What to compile.
        backend: The name of what compiles it.
        options: Options of the backend.
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
        self._definition = definition
        self._options = options
        self._settings = {id(o): OptimizerSettings(o) for o in definition.optimizers}
        state = StepState(definition, backend, options)
        super().__init__(StepPrograms(definition, state, self._settings, fallback == "error"))
        self._patches = Patches(definition.optimizers)
        self._split: Callable[..., Any] | None = None
        self._is_checked = False
        self._lock = threading.RLock()
        self._last: LastCall | None = None
        reason = outside_effect(definition.models, definition.optimizers)
        if reason is not None:
            self._compile_parts(StepCaptureError(reason))

    def _compile_parts(self, error: StepCaptureError) -> None:
        """Hands the function to `torch.compile`, or raises if parts are not wanted."""
        if self._programs.raises:
            raise error
        log.warning('%s torch.compile compiles the step in parts (fallback="split").', error)
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
            "a compiled step cannot be copied or pickled, because it is bound to its model and "
            "optimizer. Copy these, and call dynamo_backends.compile_step for the copies."
        )

    @property
    def compilations(self) -> int:
        """Counts the graphs that were compiled."""
        return self._programs.compilations

    @property
    def reasons(self) -> list[str]:
        """Returns why each of them but the first was compiled."""
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
        return [program.report for program in self._programs.kept]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one training step with the function's arguments.

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
            path: Path of the file; it is replaced if it exists.

        Raises:
            SaveError: No step was taken yet, or it does what a file cannot hold.
        """
        write: Callable[[Any, Snapshot], None] = import_attribute(_SAVING)
        write(path, self.snapshot())

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
            is_spread = self._definition.parallel is not None
            returned = None if is_spread else result_template(session.segment, result)
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
        if is_spread:
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
        calls = (node.target for p in self._programs.kept for node in p.graph.calls)
        if self.eager_steps > 1 or any(f is not torch.ops.aten.alias.default for f in calls):
            return
        backend, function = self._state.backend, self._definition.function
        name = str(getattr(function, "__qualname__", type(function).__name__))
        if backend.strict:
            raise uncaptured_error(backend.name, name, NO_OPERATORS)
        publish_nothing_compiled(GraphReport(backend.name, "step"), name, NO_OPERATORS)

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
        batch = GlobalBatch(parallel, (args, kwargs))
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

    def _note_divergence(self, line: str) -> None:
        self.divergences = [*self.divergences[1 - MANY :], line]
        if self.divergences.count(line) == MANY:
            log.warning(
                "A step took a new code path %d times, at %s. Such calls run in eager. Pass values "
                "that change at each step as tensors or floats.", MANY, line,
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
            raise SaveError("the step cannot be saved: it uses a mesh.")
        if self.is_split:
            raise SaveError("the step cannot be saved: torch.compile runs it in parts.")
        if call is None:
            raise SaveError("there is no compiled step yet. Call the step once before saving.")
        with self._lock:
            self._refresh()
            return snapshot_of(call, self._programs, self._options or {}, self.refusals)

    def _refresh(self) -> None:
        """Looks for other parameters, buffers and states than there were."""
        change = self._state.refresh()
        if change is not None:
            try:
                backend = self._state.backend
                refuse_foreign_step(self._state.inventory.tensors, backend.name, backend.home)
            except StepDeviceError as error:
                self._compile_parts(error)
            replaced, is_like = change
            if not is_like:
                self._forget_programs()
            self._programs.rebind(replaced)

    def _forget_programs(self) -> None:
        self._programs.forget()


def _detached(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_leaf else tensor.detach()
