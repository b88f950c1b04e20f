"""An `autograd.Function` of the user's in a step: forward and backward are Python, and run as such.

The forward runs without gradients, as in autograd; its calls are followed like all others. Then
`tape.attach_function_node` gives the results a history. The backward is called where a backward
pass reaches it.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.utils.hooks import RemovableHandle

from dynamo_backends._torch_private.autograd_nodes import bind_arguments, version_of
from dynamo_backends.aot.step.backward.hooks import (
    Gradients,
    call_posthooks,
    call_prehooks,
    register,
)
from dynamo_backends.aot.step.backward.tape import attach_function_node
from dynamo_backends.aot.step.record.placeholders import is_placeholder


class Context(FunctionCtx):
    """The `ctx` that `forward` and `backward` of a function share, with its autograd node.

    Args:
        function: The class.
        needs_input_grad: For each argument whether a gradient is asked for.
    """

    def __init__(self, function: Any, needs_input_grad: tuple[bool, ...]):
        self.needs_input_grad = needs_input_grad
        self.metadata: dict[Any, Any] = {}
        self._function = function
        self._saved: tuple[Tensor | None, ...] | None = ()
        self._versions: list[int | None] = []
        self._in_region: Any = None
        self._is_saved: list[bool] = []
        self._prehooks: dict[int, Any] = OrderedDict()
        self._hooks: dict[int, Any] = OrderedDict()

    @property
    def saved_tensors(self) -> tuple[Tensor | None, ...]:
        """Returns what `save_for_backward` got.

        Raises:
            RuntimeError: As eager's.
        """
        if self._saved is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time (or directly access saved "
                "tensors after they have already been freed). Specify retain_graph=True if you "
                "need to backward through the graph a second time."
            )
        if self._in_region is not None:
            tensors = iter(self._in_region.tensors())
            return tuple(next(tensors) if is_saved else None for is_saved in self._is_saved)
        for tensor, version in zip(self._saved, self._versions, strict=False):
            if version is not None and tensor is not None and _version(tensor) != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by "
                    f"an inplace operation: {tensor.dtype}{list(tensor.shape)}"
                )
        return self._saved

    saved_variables = saved_tensors

    def name(self) -> str:
        """Returns the node's name."""
        return f"{self._function.__name__}Backward"

    def register_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """As of an autograd node."""
        return register(hook, self._hooks)

    def register_prehook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """As of an autograd node."""
        return register(hook, self._prehooks)

    def save(self, passes: Any, has_values: bool) -> None:
        """The forward is over: keeps what it saves.

        Args:
            passes: The places of user code of the segment.
            has_values: Whether tensors have contents.
        """
        self._saved = tuple(vars(self).pop("to_save", None) or ())
        if passes.is_in_region:
            self._is_saved = [t is not None for t in self._saved]
            self._in_region = passes.save_in_region([t for t in self._saved if t is not None])
        if self._in_region is not None:
            self._saved = ()
        elif has_values:
            self._versions = [None if t is None else _version(t) for t in self._saved]

    def free(self) -> None:
        """Frees what was saved: no other pass may follow."""
        if self._saved or self._in_region is not None:
            self._saved = None


def _version(tensor: Tensor) -> int | None:
    return None if is_placeholder(tensor) else version_of(tensor)


class FunctionBackwardCallback:
    """Calls the backward of a user's `autograd.Function` in a backward pass."""

    def __init__(
        self,
        context: Context,
        outputs: Sequence[Any],
        differentiable: Sequence[int],
        arguments: Sequence[Any],
    ):
        self.context = context
        self._differentiable = differentiable
        self._like = [
            (tuple(x.shape), x.dtype, x.device) if isinstance(x, Tensor) else None for x in outputs
        ]
        self._is_tensor = [isinstance(x, Tensor) for x in arguments]

    def __call__(self, arrived: Gradients) -> Gradients:
        """Calls the backward: from gradients of differentiable outputs to those of tensors."""
        context = self.context
        gradients: list[Tensor | None] = [None] * len(self._like)
        for i, gradient in zip(self._differentiable, arrived, strict=True):
            gradients[i] = gradient
        given = call_prehooks(context._prehooks, tuple(gradients))
        if getattr(context, "materialize_grads", True):
            given = tuple(map(_materialized, given, self._like))
        results = self._checked(_as_tuple(_backward_of(context._function)(context, *given)))
        results = call_posthooks(context._hooks, results, given)
        needs = [n for n, t in zip(context.needs_input_grad, self._is_tensor, strict=True) if t]
        return tuple(g if n else None for g, n in zip(results, needs, strict=True))

    def _checked(self, results: tuple[Any, ...]) -> Gradients:
        name, count = self.context.name(), len(self._is_tensor)
        while len(results) > count and results[-1] is None:
            results = results[:-1]
        if len(results) != count:
            raise RuntimeError(
                f"function {name} returned an incorrect number of gradients (expected {count}, got "
                f"{len(results)})"
            )
        for i, (result, is_tensor) in enumerate(zip(results, self._is_tensor, strict=True)):
            if result is not None and not is_tensor:
                raise RuntimeError(
                    f"function {name} returned a gradient different from None at position {i + 1}, "
                    "but the corresponding forward input was not a Variable"
                )
            if result is not None and not isinstance(result, Tensor):
                raise TypeError(f"expected Variable or None (got {type(result).__name__})")
        return tuple(r for r, is_tensor in zip(results, self._is_tensor, strict=True) if is_tensor)


def _as_tuple(values: Any) -> tuple[Any, ...]:
    return tuple(values) if isinstance(values, tuple | list) else (values,)


def _backward_of(function: Any) -> Any:
    is_vjp = function.backward is Function.backward and function.vjp is not Function.vjp
    return function.vjp if is_vjp else function.backward


def _materialized(gradient: Tensor | None, like: Any) -> Tensor | None:
    if gradient is not None or like is None:
        return gradient
    size, dtype, device = like
    return torch.zeros(size, dtype=dtype, device=device)


def why_not_followed(function: Any, kwargs: dict[str, Any]) -> str:
    """Returns why a function of the user's runs in eager; empty: it is followed."""
    if function.__module__.startswith("torch.distributed"):
        return "that communicates with other processes"
    if kwargs and function.setup_context is Function.setup_context:
        return "with keyword arguments"
    methods = (vars(kind).get(n) for kind in function.__mro__ for n in ("forward", "backward"))
    if not all(isinstance(method, staticmethod) for method in methods if method is not None):
        return "whose methods are not static"
    return ""


def apply(session: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Applies a function in a step."""
    has_setup = function.setup_context is not Function.setup_context
    if has_setup:
        args, kwargs = bind_arguments(function.forward, args, kwargs)
    needs = tuple(isinstance(x, Tensor) and x.requires_grad for x in args)
    with_history = torch.is_grad_enabled() and any(needs)
    context = Context(function, needs if with_history else (False,) * len(args))
    with torch.no_grad():
        if has_setup:
            result = function.forward(*args, **kwargs)
            function.setup_context(context, args, result)
            _refuse_saved_results(context, args, result)
        else:
            result = function.forward(context, *args, **kwargs)
        outputs = list(result) if isinstance(result, tuple) else [result]
        if with_history:
            differentiable, written = _separate(context, outputs, args)
    if with_history and differentiable:
        inputs = tuple(x for x in args if isinstance(x, Tensor))
        positions = tuple(i for i, x in enumerate(inputs) if any(x is outputs[k] for k in written))
        attach_function_node(
            function.__name__, tuple(outputs[i] for i in differentiable), inputs, positions
        )
        place = FunctionBackwardCallback(context, outputs, differentiable, args)
        session.nested.add_function(place, [outputs[i] for i in differentiable])
        context.save(session.nested, has_values=not session.replaying)
    return tuple(outputs) if isinstance(result, tuple) else outputs[0]


def _refuse_saved_results(context: Context, args: tuple[Any, ...], result: Any) -> None:
    outputs = [x for x in _as_tuple(result) if isinstance(x, Tensor) and any(x is a for a in args)]
    if any(x is y for x in getattr(context, "to_save", None) or () for y in outputs):
        raise RuntimeError(
            "An input that has been returned as-is as output is being saved for backward. This is "
            "not supported if you override setup_context. You should return and save a view of the "
            "input instead, e.g. with x.view_as(x) or setup ctx inside the forward function itself."
        )


def _separate(
    context: Context, outputs: list[Any], args: tuple[Any, ...]
) -> tuple[list[int], list[int]]:
    """Returns which outputs have a gradient, and which are arguments that were written to."""
    dirty = getattr(context, "dirty_tensors", None) or ()
    without = getattr(context, "non_differentiable", None) or ()
    differentiable, written = [], []
    seen: set[int] = set()
    for i, output in enumerate(outputs):
        if not isinstance(output, Tensor) or any(output is x for x in without):
            continue
        if not (output.is_floating_point() or output.is_complex()):
            continue
        differentiable.append(i)
        if any(output is x for x in dirty) and any(output is x for x in args):
            written.append(i)
        elif output.requires_grad or id(output) in seen or any(output is x for x in args):
            outputs[i] = output.view_as(output)
        seen.add(id(output))
    return differentiable, written
