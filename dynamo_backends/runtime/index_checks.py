"""Checks index bounds of a call, and repeats it in eager to raise eager's error."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import generated_forward
from dynamo_backends.graph.index_checks import InputCheck

Run = Callable[[list[Any]], Sequence[Any]]

_MARK = "_dynamo_backends_of_positions"


class InputBoundsCheck:
    """Tests whether indices among the inputs of a call are out of range.

    Args:
        check: What to check.
    """

    def __init__(self, check: InputCheck):
        self._reads = check.reads
        self._compute = check.module.forward
        self._stable = check.stable
        self._constants = check.constants
        self._seen: list[tuple[weakref.ref[Tensor] | None, int]] = [(None, 0)] * len(check.stable)

    def __call__(self, args: Sequence[Any]) -> bool:
        """Returns whether one is.

        Args:
            args: The inputs of the graph.
        """
        values = self._compute(*[args[i] for i in self._reads], *self._constants)
        for i, stable in enumerate(self._stable):
            tensor, least, most = values[3 * i : 3 * i + 3]
            if stable and self._is_known(i, tensor):
                continue
            if _is_outside(tensor, least, most):
                self._seen[i] = (None, 0)
                return True
        return False

    def _is_known(self, i: int, tensor: Tensor) -> bool:
        """Returns whether a weight has been checked as it is now; notes that it is."""
        if tensor.is_inference():  # has no version
            return False
        version = tensor._version
        ref, checked = self._seen[i]
        if ref is not None and ref() is tensor and version == checked:
            return True
        self._seen[i] = (weakref.ref(tensor), version)
        return False


def _is_outside(tensor: Tensor, least: int | None, most: int | None) -> bool:
    """Returns whether a value is out of bounds, or an assertion without bounds is false."""
    if least is None or most is None:
        return not tensor.all().item()
    if tensor.numel() == 0:
        return False
    low, high = torch.aminmax(tensor)
    return bool(low.item() < least or high.item() > most)


class OutOfRangeError(Exception):
    """Compiled code found an index out of range; the call is repeated in eager."""


def wrap_raise_on_flag(run: Run, flag: int | None) -> Run:
    """Wraps a boxed function to raise `OutOfRangeError` if its flag output is set.

    Args:
        run: The compiled graph: list in, sequence out.
        flag: Position of the output that says so; None: there is none.
    """
    if flag is None:
        return run

    def call(args: list[Any]) -> Sequence[Any]:
        results = run(args)
        if results[flag]:
            raise OutOfRangeError
        return results

    return call


def wrap_with_bounds_checks(
    run: Run, before: InputCheck | None, flag: int | None, eager: Run
) -> Run:
    """Wraps a boxed function to repeat calls with bad indices in eager.

    Args:
        run: The compiled graph (see `wrap_raise_on_flag`), with all that is done of its results.
        before: What is checked before it is called (see `PositionChecks`).
        flag: What `wrap_raise_on_flag` was given; this output is left out.
        eager: The graph itself. What it raises is marked (see `wrap_rerun_in_eager`).
    """
    if before is None and flag is None:
        return run
    outside: Callable[[Sequence[Any]], bool]
    outside = (lambda _: False) if before is None else InputBoundsCheck(before)

    def repeat(args: list[Any]) -> Sequence[Any]:
        return call_eager_marked(eager, args)

    def check_first(args: list[Any]) -> Sequence[Any]:
        return repeat(args) if outside(args) else run(args)

    def check_both(args: list[Any]) -> Sequence[Any]:
        assert flag is not None, "or there is nothing to read"
        if outside(args):
            return repeat(args)
        given = list(args)
        try:
            results = run(args)
        except OutOfRangeError:
            return repeat(given)
        return [*results[:flag], *results[flag + 1 :]]

    return check_first if flag is None else check_both


def call_eager_marked(eager: Callable[..., Any], *args: Any) -> Any:
    """Runs eager and marks its exceptions for `wrap_rerun_in_eager`."""
    try:
        return eager(*args)
    except (IndexError, RuntimeError) as error:
        setattr(error, _MARK, True)
        raise


def _is_of_eager(error: BaseException) -> bool:
    """Returns whether eager has raised an error: the inputs are to blame."""
    return getattr(error, _MARK, False)


def wrap_rerun_in_eager(
    compiled: Callable[..., Any], captured: fx.GraphModule
) -> Callable[..., Any]:
    """Wraps a function to rerun the captured graph for eager's own exception.

    Operators that were decomposed raise other errors than those that the user called.

    Args:
        compiled: The function compiled from a graph with checks.
        captured: What it was compiled from.
    """

    def call(*args: Any) -> Any:
        try:
            return compiled(*args)
        except (IndexError, RuntimeError) as error:
            if not _is_of_eager(error):
                raise
        return generated_forward(captured)(*args)

    return call
