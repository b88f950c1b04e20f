"""A compiled training step: which of its variants takes a call, and when one is made."""

import contextlib
import gc
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dynamo_backends.aot.step.backends import step_backend
from dynamo_backends.aot.step.batches import BatchSpec, flatten_batch, kind_of_leaf, shared_memory
from dynamo_backends.aot.step.checks import all_or_nothing
from dynamo_backends.aot.step.inventory import Inventory
from dynamo_backends.aot.step.mesh.across import begin_alike, ranks_of, whole_batch
from dynamo_backends.aot.step.mesh.replicas import (
    calling_modules,
)
from dynamo_backends.aot.step.microbatches import StepCall
from dynamo_backends.aot.step.optimizers import create_state
from dynamo_backends.aot.step.outside import outside_effect
from dynamo_backends.aot.step.python_state.calls import StandInRefused
from dynamo_backends.aot.step.python_state.places import Place, is_number
from dynamo_backends.aot.step.recording import Definition, UndeclaredTensors, numbers_of
from dynamo_backends.aot.step.snapshot import Snapshot
from dynamo_backends.aot.step.variant import TRACING, Variant
from dynamo_backends.aot.step.verified import VerifiedStep
from dynamo_backends.interface.errors import SaveError, StepCaptureError
from dynamo_backends.interface.registry import load
from dynamo_backends.interface.report import GraphReport
from dynamo_backends.runtime.device_moves import move_together
from dynamo_backends.runtime.device_values import home_named
from dynamo_backends.runtime.foreign import refuse_step
from dynamo_backends.runtime.position_checks import OutOfRangeError
from dynamo_backends.runtime.residency import home_of

log = logging.getLogger("dynamo_backends")

Found = tuple[Variant, list[Tensor], tuple[float, ...]]

MAX_VARIANTS = 64
"""How many compiled variants of a step are kept; the least recently used one goes first."""

_SAVING = "dynamo_backends.package.steps.saving:save_step"  # of a higher layer

_MANY = 8  # variants for one kind of batch: more is worth a warning
_ATTEMPTS = 8  # to capture a step, each with more tensors and fewer numbers known


def searches(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer calls the model as often as values decide."""
    return isinstance(optimizer, torch.optim.LBFGS)


class EagerStep(Exception):
    """This step has to be taken in eager: it makes state that no graph can make."""


class Step:
    """A compiled training step; call it like the function.

    Attributes:
        compilations: How many graphs were compiled.
        reasons: Why each of them but the first was compiled.
        eager_steps: How many steps ran in eager: because the optimizer made its state in them, or
            because autotune compared eager, or chose it.
    """

    def __init__(
        self,
        definition: Definition,
        backend: str,
        options: Mapping[str, Any] | None,
        fallback: str,
    ):
        self.compilations = 0
        self.eager_steps = 0
        self.reasons: list[str] = []
        self._definition = definition
        parallel = definition.parallel
        mesh = None if parallel is None else parallel.mesh
        self._backend = step_backend(backend, options, mesh=mesh)
        self._options = options
        self._fallback = fallback
        self._split: Callable[..., Any] | None = None
        models, optimizers = definition.models, definition.optimizers
        if any(map(searches, optimizers)) or outside_effect(models, optimizers) is not None:
            self._split = self._compile_parts()
        self._inventory: Inventory | None = None
        self._uses = itertools.count()
        self._promoted: dict[Any, Place] = {}
        self._changed: list[Place] = []
        self._variants: dict[Any, list[Variant]] = {}
        self._retired_launches = 0

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
    def recompiles(self) -> int:
        """How many graphs were compiled after the first."""
        return max(0, self.compilations - 1)

    @property
    def launches(self) -> int:
        """How many executables were launched: one per step."""
        return self._retired_launches + sum(v.program.launches for v in self._all_variants())

    @property
    def reports(self) -> list[GraphReport]:
        """One for each compiled graph that is kept; of a step on a mesh they say what is where."""
        return [variant.report for variant in self._all_variants()]

    @property
    def is_split(self) -> bool:
        """Whether the step could not be one graph and is run in parts by `torch.compile`."""
        return self._split is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Takes one step.

        Returns:
            What the function returns; tensors in it are detached.

        Raises:
            StepCaptureError: It cannot be one graph, and `fallback` is "error".
            RankError: Another process of the mesh has ended, is suspended or does something else.
        """
        if self._split is not None:
            return self._split(*args, **kwargs)
        batch, spec = flatten_batch((args, kwargs))
        if self._tensors() is None and not self._rebuild():
            return self._in_eager(args, kwargs)
        try:
            found = self._find(batch, spec)
        except EagerStep:
            return self._in_eager(args, kwargs)
        except StepCaptureError as error:
            if self._fallback == "error":
                raise
            log.warning('%s The step runs in parts from now on (fallback="split").', error)
            self._split = self._compile_parts()
            return self._split(*args, **kwargs)
        program = found[0].program
        if program.prefers_eager:
            return self._in_eager(args, kwargs)
        comparison = program.comparison
        if comparison is None:
            return self._compiled_or_eager(found, batch, args, kwargs)
        turn, start = comparison.turn, time.perf_counter()
        if turn is None:
            result = self._in_eager(args, kwargs)
        else:
            result = self._compiled_or_eager(found, batch, args, kwargs)
        self._synchronize()
        comparison.note(turn, time.perf_counter() - start)
        return result

    def _compiled_or_eager(
        self, found: Found, batch: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Takes a step; in eager, which raises the error, if positions are out of range."""
        variant, tensors, numbers = found
        try:
            return variant(tensors, numbers, batch)
        except OutOfRangeError:
            with all_or_nothing(tensors):
                return self._in_eager(args, kwargs)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the step into one file, from which `load_step` makes a callable step.

        What is written is the step for the kind of batch of the last call, with parameters,
        buffers, optimizer state and numbers such as the learning rate as they are now. What the
        function reads in Python stays what it is.

        Args:
            path: Of the file; it is replaced if it exists.

        Raises:
            SaveError: No step was taken yet, or it does what a file cannot hold.
        """
        write: Callable[[Any, Snapshot], None] = load(_SAVING)
        write(path, self.snapshot())

    def snapshot(self) -> Snapshot:
        """The step for the kind of batch of the last call, as it is now.

        Raises:
            SaveError: See `save`.
        """
        if self._split is not None:
            raise SaveError('the step runs in parts (fallback="split"), and a file has one graph.')
        tensors = self._tensors()
        used = [(key, v) for key, variants in self._variants.items() for v in variants]
        if tensors is None or not used:
            raise SaveError("there is no compiled step; take one, and save it then.")
        (spec, _, *leaves), variant = max(used, key=lambda each: each[1].last_used)
        found = variant.tensors(tensors)
        if found is None:
            raise SaveError("a tensor that the step reads in Python is none any more.")
        program = variant.program
        if isinstance(program, VerifiedStep):
            program = program.compiled
        made = Snapshot(
            self._definition, self._backend, dict(self._options or {}), variant.graph, program,
            variant.recording, variant.slots, found, variant.constants, variant.draws, spec, leaves,
            variant.checks,
        )  # fmt: skip
        made.check()
        first = tuple(numbers_of(self._definition, ()))
        last = len(first) + sum(leaf is float for leaf in leaves)
        numbers = (*first, *variant.guards.numbers[len(first) : last])
        reason = variant.guards.why_not(found, numbers)
        if reason is not None:
            raise SaveError(
                f"the next step would be another one: {reason}. Take it, and save then."
            )
        return made

    def _synchronize(self) -> None:
        assert self._inventory is not None
        if any(t.is_cuda for t in self._inventory.tensors):
            torch.cuda.synchronize()

    def _tensors(self) -> list[Tensor] | None:
        return self._inventory.refresh() if self._inventory is not None else None

    def _rebuild(self) -> bool:
        """Looks at models and optimizers anew; False if a step in eager has to come first."""
        definition = self._definition
        made = [create_state(optimizer) for optimizer in definition.optimizers]
        if not all(made):
            return False
        self._take_stock()
        return True

    def _take_stock(self) -> None:
        definition = self._definition
        before = self._inventory
        self._inventory = Inventory(definition.models, definition.optimizers)
        self._settle(self._inventory)
        if before is None or not before.is_like(self._inventory):
            self._retired_launches = self.launches
            self._variants.clear()

    def _settle(self, inventory: Inventory) -> None:
        """Where the backend keeps values on devices, all that lives on moves there."""
        definition, target = self._definition, self._backend.target
        if definition.parallel is not None and target is not None:
            several = definition.models, definition.optimizers
            ranks = ranks_of(definition.parallel)
            if ranks is not None:
                begin_alike(ranks, definition.parallel, inventory, target.name)
            definition.parallel.settle(inventory, *several, target)
            return
        found = home_of(inventory.tensors)
        if found is not None and self._backend.home is None:
            self._backend = step_backend(self._backend.name, self._options, found)
        home = self._backend.home
        if home is None:
            return
        pairs = zip(inventory.slots, inventory.tensors, strict=True)
        move_together((t for slot, t in pairs if not slot.is_setting), home_named(home))

    def _in_eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        definition = self._definition
        if ranks_of(definition.parallel) is not None:
            raise StepCaptureError(
                "a step of several processes cannot be taken in eager, as the first of an "
                "optimizer that makes its state in a way of its own. Use another optimizer."
            )
        run = StepCall(
            definition.optimizers,
            definition.models,
            definition.accumulate,
            lambda _: contextlib.nullcontext(),
        )
        result = run(definition.function, args, kwargs)
        self.eager_steps += 1
        return pytree.tree_map_only(Tensor, torch.Tensor.detach, result)

    def _find(self, batch: Sequence[Any], spec: BatchSpec) -> Found:
        """A variant for this call, and the tensors and numbers of it; compiles one if need be."""
        key = (spec, shared_memory(batch), *map(kind_of_leaf, batch))
        found, reason = self._search(key, batch)
        if found is None:
            self._compile(batch, spec, key, reason)
            found, why_not = self._search(key, batch)
            if found is None:
                raise StepCaptureError(f"the step cannot be used as it was captured: {why_not}")
        variant = found[0]
        if variant.has_first:
            variant.do_first()
            found, reason = self._search(key, batch)
            if found is None:
                self._compile(batch, spec, key, reason)
                found, _ = self._search(key, batch)
            assert found is not None
        return found

    def _search(self, key: Any, batch: Sequence[Any]) -> tuple[Found | None, str]:
        tensors = self._tensors()
        assert tensors is not None
        base = tuple(numbers_of(self._definition, batch))
        reason = "another kind of batch"
        self._changed = []
        variants = self._variants.get(key, [])
        for variant in variants:
            all_tensors, numbers = variant.tensors(tensors), variant.numbers(base)
            if all_tensors is None or numbers is None:
                reason = "a Python value that the step reads changed its type"
                continue
            why_not = variant.guards.why_not(all_tensors, numbers)
            if why_not is None:
                variant.last_used = next(self._uses)
                return (variant, all_tensors, numbers), ""
            reason = why_not
            self._changed += variant.guards.changed
        return None, reason

    def _compile(self, batch: Sequence[Any], spec: BatchSpec, key: Any, reason: str) -> None:
        """Compiles the step for how things are now."""
        parallel = self._definition.parallel
        if parallel is not None and parallel.mesh.of_ranks:
            batch = whole_batch(parallel, batch)
        elif parallel is not None:
            parallel.check_batch(batch)
        if not self._rebuild():
            raise EagerStep
        self._promoted.update(
            (p.identity, p) for p in self._changed if p.key is not None or is_number(p.get())
        )
        variant = self._capture(batch, spec)
        variant.last_used = next(self._uses)
        self._variants.setdefault(key, []).append(variant)
        self._drop_oldest()
        if self.compilations:
            self.reasons.append(reason)
        self.compilations += 1
        if len(self._variants[key]) == _MANY:
            log.warning(
                "A step was compiled %d times for one kind of batch, the last time because %s. "
                "Pass what changes at each step as a tensor or a float.", _MANY, reason,
            )  # fmt: skip

    def _drop_oldest(self) -> None:
        """Keeps the number of compiled variants within bounds."""
        while sum(map(len, self._variants.values())) > MAX_VARIANTS:
            oldest = min(self._all_variants(), key=lambda variant: variant.last_used)
            self._retired_launches += oldest.program.launches
            for key, variants in list(self._variants.items()):
                if oldest in variants:
                    variants.remove(oldest)
                if not variants:
                    del self._variants[key]

    def _capture(self, batch: Sequence[Any], spec: BatchSpec) -> Variant:
        definition = self._definition
        others: list[Place] = []
        fixed: set[Any] = set()
        for _ in range(_ATTEMPTS):
            promoted = [
                p for i, p in self._promoted.items() if i not in fixed and is_number(p.get())
            ]
            inventory = Inventory(definition.models, definition.optimizers, others)
            if others and (definition.parallel is not None or self._backend.home is not None):
                # A trace refers to all tensors, which cannot be moved then: the next one, and
                # the last one until it is collected.
                gc.collect()
                self._settle(inventory)
            refuse_step((*inventory.tensors, *batch), self._backend.name, self._backend.home)
            try:
                with TRACING, calling_modules():
                    return Variant(definition, self._backend, inventory, batch, spec, promoted)
            except UndeclaredTensors as found:
                others += found.places
            except StandInRefused as refused:
                fixed.add(refused.place.identity)
                self._promoted.pop(refused.place.identity, None)
            except StepCaptureError:
                if not promoted:
                    raise
                self._promoted.clear()
        raise StepCaptureError(
            "the step makes tensors out of other libraries' data (torch.from_numpy, ...) while it "
            "runs. Pass such data as an argument."
        )

    def _compile_parts(self) -> Callable[..., Any]:
        if self._backend.name in ("aot_eager", "inductor"):
            return torch.compile(self._definition.function, backend=self._backend.name)
        from dynamo_backends.interface.compiler import compiler

        chosen = compiler(self._backend.name, **(self._options or {}))
        return torch.compile(self._definition.function, backend=chosen)

    def _all_variants(self) -> Iterator[Variant]:
        for variants in self._variants.values():
            yield from variants
