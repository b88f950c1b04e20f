"""A model at work: inference, forward and backward, or whole steps, in eager and compiled."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dynamo_backends import compile_step
from dynamo_backends.bench.accuracy import as_precise
from dynamo_backends.bench.backends import resolve_compiler
from dynamo_backends.bench.cells import Mode
from dynamo_backends.bench.exports import exported, is_export
from dynamo_backends.bench.suites.case import Inputs, ModelCase, call
from dynamo_backends.graph.precision import allows_tf32
from dynamo_backends.interface.registry import list_backends


class Tf32RoundingMode(TorchDispatchMode):
    """Dispatch mode that rounds the operands to TF32 where torch's settings allow it.

    Which of a vendor's kernels do is its own choice, and depends on shapes: eager may compute a
    convolution in float32 that a backend computes in TF32, with the same settings.
    """

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls an operator with rounded factors, if its products may be in TF32."""
        if allows_tf32(func):
            args = pytree.tree_map_only(Tensor, rounded_to_tf32, args)
        return func(*args, **(kwargs or {}))


def rounded_to_tf32(value: Tensor) -> Tensor:
    """Numbers of float32 with the ten bits of mantissa that TF32 has; others as they are."""
    if value.dtype != torch.float32:
        return value
    bits = value.contiguous().view(torch.int32)
    nearest = ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
    return torch.where(value.isfinite(), nearest, value)


DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bf16": torch.bfloat16}

# As in PyTorch's benchmark runners.
_TOLERANCE: Mapping[tuple[str, bool], float] = {
    ("float32", False): 1e-4,
    ("float32", True): 1e-3,
    ("bf16", False): 1e-2,
    ("bf16", True): 1e-2,
}
_RATE = 1e-3  # of the optimizer: weights stay what they are while steps are timed
_WHOLE_STEPS = ("inductor", "aot_eager")  # torch's own that `compile_step` takes

Runner = Callable[[], Any]
"""A call without arguments; gives what is to be checked."""


def tolerance(dtype: str, mode: Mode) -> float:
    """Returns how far results may be from eager's, absolute and relative."""
    return _TOLERANCE[dtype, mode != "inference"]


class ModelWorkload:
    """A model, its inputs and mode: inference, backward or whole training steps.

    Args:
        case: The model and its inputs.
        mode: Mode of the cell.
        dtype: Dtype of weights and inputs.
        device: Where it runs.
        backend_of: What `torch.compile` takes for the name of a backend.
    """

    def __init__(
        self,
        case: ModelCase,
        mode: Mode,
        dtype: torch.dtype,
        device: str = "cpu",
        backend_of: Callable[[str], Any] = resolve_compiler,
    ):
        self._mode, self._dtype, self._device = mode, dtype, device
        self._backend_of = backend_of
        self._model = case.make().to(device, dtype)
        if mode != "inference":
            without_dropout(self._model.train())
        self._inputs = cast(case.inputs(), device, dtype)
        self.calls = 3 if mode == "step" else 1
        """Calls after which results are compared: a step after the first has moved weights."""
        self.calls_to_compile = 2 if mode == "step" else 1
        """A first step is recorded in eager, the second one is compiled."""

    def eager(self) -> Runner:
        """Eager. Of steps each has weights of its own."""
        return self._runner(self._model, None)

    def compiled(self, backend: str) -> Runner:
        """The same by a backend, which compiles it in its first calls; exports are made here."""
        if is_export(backend):
            return exported(backend, self._model, self._inputs)
        return self._runner(self._model, backend)

    def precise(self) -> Any:
        """Returns the results in float64."""
        model = copy.deepcopy(self._model).double()
        inputs = cast(self._inputs, self._device, torch.float64)
        return results(self._runner(model, None, inputs), self.calls)

    def allowed(self, expected: Any) -> Any:
        """Returns what results may be as inexact as; None: as eager's.

        On NVIDIA GPUs these are eager's with each product in TF32 that torch's settings let be.

        Args:
            expected: Eager's own results.
        """
        if self._device != "cuda" or self._dtype != torch.float32:
            return None
        with Tf32RoundingMode():
            return as_precise(expected, results(self.eager(), self.calls))

    def _runner(
        self, model: nn.Module, backend: str | None, inputs: Inputs | None = None
    ) -> Runner:
        given = self._inputs if inputs is None else inputs
        if self._mode == "step":
            return _steps(copy.deepcopy(model), given, backend)
        function: Any = model
        if backend is not None:
            function = torch.compile(model, backend=self._backend_of(backend))
        if self._mode == "inference":
            return torch.no_grad()(lambda: call(function, given))
        return lambda: _gradients(function, model, given)


def results(run: Runner, calls: int) -> Any:
    """Returns a copy of the last result of some calls."""
    torch.manual_seed(0)
    for _ in range(calls):
        result = run()
    return detached(result)


def _gradients(function: Callable[..., Any], model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    found = loss(call(function, inputs))
    found.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": found, **gradients}


def _steps(model: nn.Module, inputs: Inputs, backend: str | None) -> Runner:
    """Steps of a model's own; they give the loss, and what moved the weights since the first."""
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    start = [p.detach().clone() for p in model.parameters()]
    whole = backend in (*_WHOLE_STEPS, *list_backends())
    function: Any = model
    if backend is not None and not whole:
        function = torch.compile(model, backend=resolve_compiler(backend))

    def step() -> Tensor:
        found = loss(call(function, inputs))
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        return found.detach()

    taken: Runner = step
    if backend is not None and whole:
        taken = compile_step(step, model=model, optimizer=optimizer, backend=backend)

    def moved() -> dict[str, Tensor]:
        found = {"loss": taken()}
        for (name, parameter), first in zip(model.named_parameters(), start, strict=True):
            found[name] = (parameter.detach() - first) / _RATE
        return found

    moved.timed = taken  # type: ignore[attr-defined]
    return moved


def timed(run: Runner) -> Runner:
    """Returns the part of a runner that is timed, without work for the comparison."""
    return getattr(run, "timed", run)


def loss(outputs: Any) -> Tensor:
    """Returns the model's own loss, or the sum of its outputs' mean squares."""
    if isinstance(outputs, Mapping) and isinstance(outputs.get("loss"), Tensor):
        found: Tensor = outputs["loss"]
        return found
    leaves = [x for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor)]
    terms = [x.square().mean() for x in leaves if x.is_floating_point()]
    return torch.stack(terms).sum()


def without_dropout(model: nn.Module) -> None:
    """Disables dropout, so that gradients can be compared."""
    for module in model.modules():
        kind = type(module).__name__
        if "Drop" in kind or "StochasticDepth" in kind:
            _set_to_zero(module, "p")
        for holder in (module, getattr(module, "config", None)):
            for name in [n for n in getattr(holder, "__dict__", {}) if "drop" in n]:
                _set_to_zero(holder, name)


def _set_to_zero(holder: Any, name: str) -> None:
    if isinstance(getattr(holder, name, None), float):
        setattr(holder, name, 0.0)


def cast(inputs: Inputs, device: str, dtype: torch.dtype) -> Inputs:
    """Inputs on a device; floating-point tensors in a dtype."""

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)

    moved: Inputs = pytree.tree_map_only(Tensor, move, inputs)
    return moved


def detached(outputs: Any) -> Any:
    """Detaches and clones tensors, so that later calls cannot change them."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), outputs)
