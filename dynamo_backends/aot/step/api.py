"""`compile_step`: a whole training step as one graph."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dynamo_backends.aot.step.backends import step_backend
from dynamo_backends.aot.step.capture import Definition, Strangers, numbers_of
from dynamo_backends.aot.step.inventory import Inventory
from dynamo_backends.aot.step.microbatches import Run
from dynamo_backends.aot.step.optimizers import create_state
from dynamo_backends.aot.step.variant import Variant
from dynamo_backends.errors import OptionError, StepCaptureError

_LBFGS = (
    "torch.optim.LBFGS calls the model several times in each step, and values decide how often; "
    'one graph cannot hold that. Pass fallback="split", which compiles the model\'s forward and '
    "backward and leaves the search to eager, or use another optimizer."
)


def compile_step(
    function: Callable[..., Any],
    *,
    model: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    backend: str = "openxla",
    options: Mapping[str, Any] | None = None,
    accumulate: int = 1,
    fallback: Literal["error", "split"] = "error",
) -> "Step":
    """Compiles a training step: forward, backward and update become one graph.

    Example:
        >>> def train(images, labels):
        ...     loss = F.cross_entropy(model(images), labels)
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     return loss
        >>> step = compile_step(train, model=model, optimizer=optimizer)
        >>> loss = step(images, labels)

    Args:
        function: Ordinary PyTorch. It is run once while it is captured, on tensors without data,
            and never again for the same kind of batch.
        model: Every module whose parameters or buffers it uses.
        optimizer: Every optimizer that it steps.
        backend: "openxla", "inductor", "aot_eager", or another backend of this package.
        options: Of the backend.
        accumulate: In how many parts the batch is taken; gradients are averaged over them.
        fallback: What to do if it cannot be captured as one graph: raise `StepCaptureError`, or
            compile the parts of it with `torch.compile`.

    Raises:
        OptionError: An argument is not valid.
        UnknownBackendError: There is no such backend.
        BackendUnavailableError: The backend cannot run here.
        StepCaptureError: An optimizer can never be part of one graph, and `fallback` is "error".
    """
    if fallback not in ("error", "split"):
        raise OptionError(f"fallback must be 'error' or 'split', not {fallback!r}")
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise OptionError(f"accumulate must be a positive integer, not {accumulate!r}")
    if fallback == "split" and accumulate > 1:
        raise OptionError(
            'accumulate cannot be combined with fallback="split": torch.compile takes whole '
            "batches. Write the loop over the parts yourself."
        )
    models = _several(model, nn.Module, "model")
    optimizers = _several(optimizer, torch.optim.Optimizer, "optimizer")
    if fallback == "error" and any(map(_searches, optimizers)):
        raise StepCaptureError(_LBFGS)
    definition = Definition(function, models, optimizers, accumulate)
    return Step(definition, backend, options, fallback)


def _searches(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.LBFGS)


def _several(given: Any, kind: type, name: str) -> tuple[Any, ...]:
    several = tuple(given) if isinstance(given, list | tuple) else (given,)
    for each in several:
        if not isinstance(each, kind):
            raise OptionError(
                f"{name} must be a {kind.__name__} or a list of them, not {type(each).__name__}"
            )
    return several


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
        self._backend = step_backend(backend, options)
        self._options = options
        self._fallback = fallback
        self._split: Callable[..., Any] | None = None
        if any(map(_searches, definition.optimizers)):
            self._split = self._compile_parts()
        self._inventory: Inventory | None = None
        self._others: list[Tensor] = []
        self._variants: dict[Any, list[Variant]] = {}
        self._retired_launches = 0

    @property
    def recompiles(self) -> int:
        """How many graphs were compiled after the first."""
        return max(0, self.compilations - 1)

    @property
    def launches(self) -> int:
        """How many executables were launched: one per step."""
        return self._retired_launches + sum(v.program.launches for v in self._all_variants())

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
        """
        if self._split is not None:
            return self._split(*args, **kwargs)
        batch, spec = pytree.tree_flatten((args, kwargs))
        tensors = self._tensors()
        if tensors is None:
            if not self._rebuild():
                return self._in_eager(args, kwargs)
            tensors = self._tensors()
            assert tensors is not None
        numbers = tuple(numbers_of(self._definition, batch))
        try:
            variant = self._find(tensors, numbers, batch, spec)
        except StepCaptureError:
            if self._fallback == "error":
                raise
            self._split = self._compile_parts()
            return self._split(*args, **kwargs)
        assert self._inventory is not None
        program, stock = variant.program, self._inventory.tensors
        if program.yields:
            return self._in_eager(args, kwargs)
        duel = program.duel
        if duel is None:
            return variant(stock, numbers, batch)
        turn, start = duel.turn, time.perf_counter()
        result = self._in_eager(args, kwargs) if turn is None else variant(stock, numbers, batch)
        self._synchronize()
        duel.note(turn, time.perf_counter() - start)
        return result

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
        self._inventory = Inventory(definition.models, definition.optimizers, self._others)
        if before is None or not before.is_like(self._inventory):
            self._retired_launches = self.launches
            self._variants.clear()

    def _in_eager(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        definition = self._definition
        run = Run(
            definition.optimizers,
            definition.models,
            definition.accumulate,
            lambda _: contextlib.nullcontext(),
        )
        result = run(definition.function, args, kwargs)
        self.eager_steps += 1
        return pytree.tree_map_only(Tensor, torch.Tensor.detach, result)

    def _find(
        self, tensors: list[Tensor], numbers: tuple[float, ...], batch: Sequence[Any], spec: Any
    ) -> Variant:
        key = (spec, *map(_kind, batch))
        reason = "another kind of batch"
        for variant in self._variants.get(key, ()):
            why_not = variant.guards.why_not(tensors, numbers)
            if why_not is None:
                return variant
            reason = why_not
        variant = self._compile(batch, spec)
        self._variants.setdefault(key, []).append(variant)
        if self.compilations:
            self.reasons.append(reason)
        self.compilations += 1
        return variant

    def _compile(self, batch: Sequence[Any], spec: Any) -> Variant:
        for _ in range(2):
            assert self._inventory is not None
            try:
                return Variant(self._definition, self._backend, self._inventory, batch, spec)
            except Strangers as found:
                self._others += found.tensors
                self._rebuild()
        raise StepCaptureError(
            "the step makes tensors out of other libraries' data (torch.from_numpy, ...) while it "
            "runs. Pass such data as an argument."
        )

    def _compile_parts(self) -> Callable[..., Any]:
        if self._backend.name in ("aot_eager", "inductor"):
            return torch.compile(self._definition.function, backend=self._backend.name)
        from dynamo_backends.registry import compiler

        chosen = compiler(self._backend.name, **(self._options or {}))
        return torch.compile(self._definition.function, backend=chosen)

    def _all_variants(self) -> Iterator[Variant]:
        for variants in self._variants.values():
            yield from variants


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device, leaf.stride(), leaf.requires_grad
    return float if isinstance(leaf, float) else (type(leaf), leaf)
