"""A captured graph that can run in eager instead: what it gains, and how exact it is."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from dynamo_backends.verify import restore_rng, snapshot_rng, widen_to_float64
from dynamo_backends.verify.comparator import relative_error
from dynamo_backends.verify.reference import captured_graph_in_float64

log = logging.getLogger("dynamo_backends")


class Float64Errors(NamedTuple):
    """The errors of compiled code and of eager against float64, relative, worst output.

    Attributes:
        own: Root mean square error of what was compiled.
        eager: The same of eager.
    """

    own: float
    eager: float


class SwitchableGraph:
    """A captured graph that runs compiled, or in eager if `in_eager` is set.

    Args:
        compiled: What the backend made of it.
        captured: The graph; nobody else changes it.

    Attributes:
        in_eager: Whether it runs in eager.
        seconds: What its calls took since `restart`.
        errors: What `comparing` found; None if the graph was not called or cannot be compared.
    """

    def __init__(self, compiled: Callable[..., Any], captured: fx.GraphModule):
        self.in_eager = False
        self.seconds = 0.0
        self.errors: Float64Errors | None = None
        self._compiled = compiled
        self._captured = captured
        self._compares = False

    def reset_seconds(self) -> None:
        """Resets `seconds` to 0."""
        self.seconds = 0.0

    def __call__(self, *args: Any) -> Any:
        """Runs the graph, in eager or compiled as the switch says."""
        if self._compares and self.errors is None:
            return self._compared(args)
        run = self._captured.forward if self.in_eager else self._compiled
        synchronize_cuda()
        start = time.perf_counter()
        result = run(*args)
        synchronize_cuda()
        self.seconds += time.perf_counter() - start
        return result

    @contextlib.contextmanager
    def compare_next_call(self) -> Iterator[None]:
        """Compares the next call with eager and float64, on copies (context manager)."""
        self._compares = True
        try:
            yield
        finally:
            self._compares = False

    def _compared(self, args: Sequence[Any]) -> Any:
        before = snapshot_rng()
        eager = precise = None
        try:
            with torch.no_grad():
                eager = list(self._captured(*map(_copied, args)))
                restore_rng(before)
                precise = list(captured_graph_in_float64(self._captured)(*map(_widened, args)))
        except Exception:  # such as a cast to float32 in the middle
            log.debug("a graph cannot be compared with float64", exc_info=True)
        restore_rng(before)
        result = self._compiled(*args)
        if eager is not None and precise is not None:
            own = list(result)
            self.errors = Float64Errors(
                relative_error(precise, own), relative_error(precise, eager)
            )
        return result


def synchronize_cuda() -> None:
    """Waits for the current GPU's work, if this process has initialized CUDA."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _copied(value: Any) -> Any:
    """Returns what a graph may write to; parameters it only reads."""
    if not isinstance(value, Tensor):
        return value
    return value.detach() if isinstance(value, nn.Parameter) else value.detach().clone()


def _widened(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    wide = widen_to_float64(value.detach())
    return _copied(value) if wide.dtype == value.dtype else wide
