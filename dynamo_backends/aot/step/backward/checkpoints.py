"""Activation checkpoints (`use_reentrant=False`) in a step: regions that are computed twice.

The user's function runs twice at every call, as in eager: in the forward, and where a backward
pass first needs what the region has not saved. Each run is calls like all others; they are in a
region, which is part of the settings that they are compared with. When they are executed, tensors
that autograd saves in the first run are replaced by holders, and found again in the second.

What Python code saves in a region, an `autograd.Function` of the user's or a checkpoint within it,
is found by the order in which it is saved.
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointError, noop_context_fn

from dynamo_backends._torch_private import saved_tensors_hooks as saved_hooks
from dynamo_backends._torch_private.autograd_nodes import (
    NO_TASK,
    SAVES_ANOTHER,
    StopRecomputation,
    early_stop_setting,
    generator_state,
    graph_task,
    set_generator_state,
)
from dynamo_backends.aot.step.backward.engine import RecomputationNeeded
from dynamo_backends.aot.step.backward.tape import Tape, current_tape, dispatch_to_function_mode


@dataclass
class Region:
    """A checkpointed region, in one run of its calls.

    Attributes:
        preserves: Whether it draws the same numbers again.
        stops_early: Whether the second run ends once all is there that was saved.
        checks: Whether sizes, dtypes and devices are compared.
        random: The generator's state before the first run.
        outer: And before the second.
        saved: Size, dtype and device of each tensor that the first run saves.
        now: What the second run saves, while it runs.
        by_task: That of passes of autograd's own engine.
    """

    preserves: bool
    stops_early: bool
    checks: bool
    random: Tensor | None = None
    outer: Tensor | None = None
    saved: list[Any] = field(default_factory=list)
    now: list[Tensor] | None = None
    by_task: dict[int, list[Tensor]] = field(default_factory=dict)

    @property
    def is_recomputed(self) -> bool:
        """Returns whether the second run may end."""
        return self.stops_early and self.now is not None and len(self.now) == len(self.saved)

    def begin(self) -> None:
        """The second run begins."""
        self.now = []
        if self.random is not None:
            self.outer = generator_state()
            set_generator_state(self.random)

    def end(self) -> list[Tensor]:
        """It ends: what it has saved."""
        recomputed, self.now = self.now, None
        if self.outer is not None:
            set_generator_state(self.outer)
        assert recomputed is not None
        if len(recomputed) != len(self.saved):
            raise CheckpointError(
                "torch.utils.checkpoint: A different number of tensors was saved during the "
                "original forward and recomputation.\nNumber of tensors saved during forward: "
                f"{len(self.saved)}\nNumber of tensors saved during recomputation: "
                f"{len(recomputed)}."
            )
        if self.checks and list(map(_metadata, recomputed)) != self.saved:
            raise CheckpointError(
                "torch.utils.checkpoint: Recomputed values for the following tensors have "
                "different metadata than during the forward pass."
            )
        return recomputed


def _metadata(tensor: Tensor) -> Any:
    return tuple(tensor.shape), tensor.dtype, tensor.device


@dataclass(frozen=True)
class _RegionHook:
    """A hook on tensors that autograd saves in a region; equal to that of another call."""

    number: int
    is_second: bool


class Pack(_RegionHook):
    """Packs a saved tensor of a checkpointed region (a `saved_tensors_hooks` pack hook)."""

    def __call__(self, tensor: Tensor) -> Any:
        """Saves a tensor, or a holder instead of it."""
        tape = current_tape()
        region = tape.regions[self.number]
        if tape.is_number(tensor):
            return tensor  # autograd saves numbers without hooks
        if not self.is_second:
            region.saved.append(_metadata(tensor))
            return len(region.saved) - 1
        # A node that saved its own result, with history, would refer to itself.
        tensor = tensor.detach() if tensor.requires_grad else tensor
        if region.now is None or region.is_recomputed:
            return tensor
        if len(region.now) == len(region.saved):
            raise CheckpointError(
                "torch.utils.checkpoint: trying to save more tensors during recomputation than "
                "during the original forward pass."
            )
        region.now.append(tensor)
        if region.is_recomputed and tape.answers is not None:
            raise StopRecomputation
        return tensor


class Unpack(_RegionHook):
    """Unpacks a saved tensor of a checkpointed region, recomputing it if necessary."""

    def __call__(self, saved: Any) -> Tensor:
        """Returns the saved tensor, recomputed if the region did not keep it."""
        if isinstance(saved, Tensor):
            return saved
        tape = current_tape()
        running = tape.running
        if running is not None:
            if self.number not in running.recomputed:
                raise RecomputationNeeded(self.number)
            return running.recomputed[self.number][saved]
        region, task = tape.regions[self.number], graph_task()
        if task not in region.by_task:
            if tape.answers is None:
                raise CheckpointError(
                    "a checkpoint requests saved tensors outside of a backward pass"
                )
            tape.answers(self.number, ())
        return region.by_task[task][saved]


# The functions that records hold.


@dispatch_to_function_mode
def open_region(preserves: bool, stops_early: bool, checks: bool) -> None:
    """Begins a checkpoint's region in the record."""
    tape, region = current_tape(), Region(preserves, stops_early, checks)
    region.random = generator_state() if preserves else None
    tape.regions[len(tape.places)] = region
    tape.places.append((None, 0))


@dispatch_to_function_mode
def begin_recomputation(number: int) -> None:
    """Begins the second run of a region."""
    current_tape().regions[number].begin()


@dispatch_to_function_mode
def end_recomputation(number: int, depth: int) -> None:
    """Ends a checkpoint's recomputation.

    Args:
        number: The place of the region.
        depth: Depth of the pass that needs it; negative: one of autograd's own engine.
    """
    tape = current_tape()
    region = tape.regions[number]
    recomputed = region.end()
    if depth < 0:
        region.by_task = {graph_task(): recomputed}
    else:
        tape.passes[depth].recomputed[number] = recomputed


@dispatch_to_function_mode
def save_in_region(*tensors: Tensor) -> None:
    """Saves tensors as autograd does; a call of the record, with which a recomputation may end."""
    pack, _ = saved_hooks()
    for tensor in tensors:
        pack(tensor)


MARKS = (open_region, begin_recomputation, end_recomputation)
"""What is part of a record although no tensors are."""


def is_of_region(hooks: Any) -> bool:
    """Returns whether hooks on saved tensors are those of a region."""
    return hooks is None or isinstance(hooks[0], Pack)


def must_stop(state: Any, tape: Tape) -> bool:
    """Returns whether a recomputation ends with the call that has just been executed."""
    hooks = state[1]
    return hooks is not None and hooks[0].is_second and tape.regions[hooks[0].number].is_recomputed


class RecomputeCallback:
    """Recomputes a checkpointed region when a backward pass needs its saved tensors.

    Args:
        passes: The places of user code of the segment.
        number: The place.
        function: Function of the region.
        args: Its arguments.
        kwargs: Its keyword arguments.
        saved: The tensors among the arguments, if the region is within another.
    """

    def __init__(
        self,
        passes: Any,
        number: int,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        saved: "SavedTensors | None",
    ):
        self._passes = passes
        self._number = number
        self._saved = saved
        if saved is not None:
            args = [_TENSOR if isinstance(x, Tensor) else x for x in args]
        self._call: Any = (function, args, kwargs)
        self._count = 0
        self._again: list[Sequence[Tensor]] = []
        self._recomputed: dict[int, list[Sequence[Tensor]]] = {}
        self._autocast: dict[str, Any] = {
            "enabled": torch.is_autocast_enabled("cpu"),
            "dtype": torch.get_autocast_dtype("cpu"),
            "cache_enabled": torch.is_autocast_cache_enabled(),
        }

    def __call__(self, arrived: Any) -> tuple[()]:
        """Runs the function again."""
        passes = self._passes
        function, args, kwargs = self._call
        if self._saved is not None:
            tensors = iter(self._saved.tensors())
            args = [next(tensors) if x is _TENSOR else x for x in args]
        again: list[Sequence[Tensor]] = []
        self._again = again
        begin_recomputation(self._number)
        autocast = torch.amp.autocast("cpu", **self._autocast)
        with (
            contextlib.suppress(StopRecomputation),
            _hooks(self._number, is_second=True),
            passes.in_region(self, is_second=True),
            torch.enable_grad(),
            autocast,
        ):
            function(*args, **kwargs)
        end_recomputation(self._number, passes.depth)
        self._recomputed = {passes.task: again}
        return ()

    def save(self, tensors: Sequence[Tensor], is_second: bool) -> "SavedTensors | None":
        """Notes that Python code saves tensors; in the first run it is told how to find them."""
        if is_second:
            self._again.append(tensors)
            return None
        self._count += 1
        return SavedTensors(self, self._count - 1)

    def recomputed(self, index: int) -> Sequence[Tensor]:
        """Returns what Python code has saved, by the order; runs the function again if need be."""
        task = self._passes.task
        if task == NO_TASK or task not in self._recomputed:
            self(())
        return self._recomputed[task][index]


@dataclass(frozen=True)
class SavedTensors:
    """Tensors that Python code has saved in a region."""

    place: RecomputeCallback
    index: int

    def tensors(self) -> Sequence[Tensor]:
        """They are recomputed, if the pass that is running has not done so."""
        return self.place.recomputed(self.index)


_TENSOR: Any = object()


@contextlib.contextmanager
def _hooks(number: int, is_second: bool) -> Iterator[None]:
    with saved_tensors_hooks(Pack(number, is_second), Unpack(number, is_second)):
        yield


def disabling_region_hooks() -> contextlib.AbstractContextManager[Any]:
    """Disables the region's saved-tensor hooks (context manager)."""
    if saved_hooks() is None:
        return contextlib.nullcontext()
    return saved_tensors_hooks(_same, _same)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def region(session: Any, original: Any, *args: Any, **kwargs: Any) -> Generator[None, None, None]:
    """Replaces torch's generator of a checkpoint, which runs before and after its function."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    reason = _why_not(given)
    if reason:
        session.go_eager(reason)
        yield from original(*args, **kwargs)
        return
    if not torch.is_grad_enabled():
        yield
        return
    passes, saved = session.nested, None
    tensors = [x for x in given["args"] if isinstance(x, Tensor)]
    if passes.is_in_region and (tensors or SAVES_ANOTHER):
        another = [torch.empty(0)] if SAVES_ANOTHER else []
        passes.save_in_region(another)
        saved = passes.save_in_region(tensors)
    number = passes.next_place
    open_region(
        bool(given["preserve_rng_state"]),
        early_stop_setting(given.get("early_stop", True)),
        given["determinism_check"] == "default",
    )
    place = RecomputeCallback(passes, number, given["fn"], given["args"], given["kwargs"], saved)
    passes.add_region(place)
    with _hooks(number, is_second=False), passes.in_region(place, is_second=False):
        yield


def _why_not(given: dict[str, Any]) -> str:
    tensors = [x for x in (*given["args"], *given["kwargs"].values()) if isinstance(x, Tensor)]
    if given["context_fn"] is not noop_context_fn or given["debug"]:
        return "a checkpoint with a custom context_fn"
    if any(x.device.type != "cpu" for x in tensors) or torch.get_default_device().type != "cpu":
        return "checkpoints on a device other than the CPU"
    return ""


@dataclass(frozen=True)
class GeneratorState:
    """Refers to a saved state of torch's generator by its number.

    Attributes:
        number: Which one of the calls since the last cut.
    """

    number: int


@dispatch_to_function_mode
def save_rng_state() -> None:
    """Saves the state of torch's generator when a checkpointed region begins."""
    current_tape().states.append(generator_state())


@dispatch_to_function_mode
def restore_rng_state(number: int) -> None:
    """Restores the generator's state that `save_rng_state` saved under a number."""
    set_generator_state(current_tape().states[number])


def rng_state_for_checkpoint(session: Any) -> GeneratorState | None:
    """Stands in for `torch.get_rng_state` when a checkpoint calls it; else None."""
    if torch.cuda.is_initialized() or not _is_called_by_checkpoint():
        return None
    save_rng_state()
    return session.nested.next_state()


def _is_called_by_checkpoint() -> bool:
    frame: FrameType | None = sys._getframe(3)
    for _ in range(4):  # past `torch.random.fork_rng`, and what enters that
        if frame is None:
            return False
        if frame.f_globals.get("__name__") == checkpoint.__name__:
            return True
        frame = frame.f_back
    return False
