"""While a step is captured, its tensors stand in for the real ones, wherever code reads them.

Modules, optimizers and closures keep their own tensors; a torch function mode hands the tensors of
the trace to every call instead. So nothing of the user's has to be changed and put back.
"""

import contextlib
import itertools
import linecache
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from dynamo_backends._torch_private import (
    FakeTensor,
    FakeTensorMode,
    compiling,
    graph_being_traced,
    mark_backward_pass,
    run_backward_under_modes,
)
from dynamo_backends.aot.step import rewrites
from dynamo_backends.aot.step.optimizers import has_formulas_for_graphs
from dynamo_backends.aot.step.scalars import Scalars
from dynamo_backends.errors import StepCaptureError

_T = torch.Tensor

# What makes a Python value of a tensor, and the function that does so for a number's tensor.
_ASKS: dict[Callable[..., Any], Callable[[Any], Any]] = {
    _T.__bool__: bool, _T.item: lambda x: x.item(), _T.__float__: float, _T.__int__: int,
    _T.__index__: int, _T.tolist: lambda x: x.tolist(),
}  # fmt: skip


class Substitution(TorchFunctionMode):
    """Replaces real tensors by those of a trace.

    Args:
        mode: The fake mode of the trace.
        scalars: The numbers that are inputs.

    Attributes:
        strangers: Real tensors that nobody announced, in the order in which they were met.
        in_optimizer: An optimizer's step is running: numbers that it reads stay tensors.
    """

    def __init__(self, mode: FakeTensorMode, scalars: Scalars):
        super().__init__()
        self._mode = mode
        self._scalars = scalars
        self._fakes: dict[int, Tensor] = {}
        self._reals: dict[int, Tensor] = {}
        self._passes = itertools.count()
        self.strangers: list[Tensor] = []
        self.in_optimizer = False

    def add(self, real: Tensor, fake: Tensor) -> None:
        """From now on `fake` stands in for `real`."""
        self._fakes[id(real)] = fake
        self._reals[id(fake)] = real

    def fake(self, real: Tensor) -> Tensor:
        """What stands in for a tensor: itself if it is one of the trace."""
        if isinstance(real, FakeTensor):
            return real
        fake = self._fakes.get(id(real))
        if fake is None:
            self.strangers.append(real)
            fake = self._mode.from_tensor(real, static_shapes=True)
            self.add(real, fake)
        return fake

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Executes a call on the tensors of the trace."""
        if kwargs and kwargs.get("generator") is not None:
            _refuse_generator(func)
        args, kwargs = pytree.tree_map_only(Tensor, self.fake, (args, kwargs or {}))
        if func is _T.backward:
            return self._backward(*args, **kwargs)
        if func is torch.autograd.backward:
            return self._run_backward(*args, **kwargs)
        result = self._call(func, args, kwargs)
        return self._reals.get(id(result), result) if isinstance(result, Tensor) else result

    @contextlib.contextmanager
    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Inside: an optimizer's step runs."""
        self.in_optimizer = True
        try:
            with compiling(has_formulas_for_graphs(optimizer)):
                yield
        finally:
            self.in_optimizer = False

    def _call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        scalars = self._scalars
        for target in rewrites.written(func, args, kwargs):
            scalars.forget(target)
        if func in _ASKS:
            term = scalars.term(args[0])
            if self.in_optimizer and func is _T.item and args[0].is_floating_point():
                return args[0] if term is not None else args[0].double()
            if term is not None and (func is _T.__bool__ or scalars.number(args[0])):
                return scalars.ask(term, _ASKS[func])
            return self._read(func, args, kwargs)
        on_lists = rewrites.on_lists(func)
        if on_lists is not None:
            return on_lists(*args, **kwargs)
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if scalars.are_all(tensors):
            # Numbers keep their precision until they meet a tensor.
            if func is _T.to and scalars.number(args[0]):
                return args[0]
            return scalars.apply(rewrites.NEW_INSTEAD.get(func, func), args, kwargs)
        if func in rewrites.WITH_TENSORS and rewrites.has_tensor_number(kwargs):
            return rewrites.WITH_TENSORS[func](*args, **kwargs)
        if func in rewrites.POSITIONAL and rewrites.takes_numbers(args, kwargs):
            return rewrites.POSITIONAL[func](*args, **kwargs)
        if func in rewrites.NEW_INSTEAD:
            return func(*rewrites.like_numbers(args), **kwargs)
        return func(*args, **kwargs)

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return func(*args, **kwargs)  # constants have a value in the trace, too
        except Exception as error:
            raise StepCaptureError(
                f"the step reads a value out of a tensor ({name_of(func)}) at {user_line()}. "
                "One graph cannot decide or print in the middle of a step: return the tensor and "
                "read it afterwards, use torch.where instead of `if`, or pass "
                'fallback="split" to compile the parts between such places with torch.compile.'
            ) from error

    def _backward(
        self,
        loss: Tensor,
        gradient: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        self._run_backward(loss, gradient, retain_graph, create_graph, inputs=inputs)

    def _run_backward(
        self,
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        given = grad_tensors if grad_variables is None else grad_variables

        def run() -> None:
            with self:  # for hooks, and for what a checkpoint computes again
                run_backward_under_modes(tensors, given, retain_graph, create_graph, inputs)

        _, nodes = nodes_of(run)
        mark_backward_pass(nodes, next(self._passes))


def nodes_of(call: Callable[[], Any]) -> tuple[Any, list[fx.Node]]:
    """What a call returns, and the nodes it leaves in the graph that is being traced."""
    graph = graph_being_traced()
    last = next(iter(reversed(graph.nodes)))  # torch 2.12 needs the iter()
    result = call()
    return result, list(itertools.takewhile(lambda n: n is not last, reversed(graph.nodes)))


_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def user_frame() -> FrameType | None:
    """The innermost frame of the call stack that is neither torch's nor this package's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((*_LIBRARIES, "<")):
        frame = frame.f_back
    return frame


def user_line() -> str:
    """Its line, for people."""
    frame = user_frame()
    if frame is None:
        return "an unknown line"
    return describe_line(frame.f_code.co_filename, frame.f_lineno)


def _refuse_generator(func: Callable[..., Any]) -> None:
    raise StepCaptureError(
        f"the step draws from a generator of its own ({name_of(func)}) at {user_line()}. Its state "
        "cannot be an input of one graph: draw from torch's default generator, which "
        "torch.manual_seed makes reproducible, draw outside of the step and pass the numbers to "
        'it, or pass fallback="split" to compile the parts around such places.'
    )


def name_of(func: Callable[..., Any]) -> str:
    """Of a torch function or method, for people: "item"."""
    return getattr(func, "__name__", str(func)).strip("_")


def line_of(error: BaseException) -> str:
    """The innermost line of an error's traceback that is neither torch's nor this package's."""
    place, trace = "an unknown line", error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith((*_LIBRARIES, "<")):
            place = describe_line(name, trace.tb_lineno)
        trace = trace.tb_next
    return place


def describe_line(file: str, number: int) -> str:
    """As "file:line, code"."""
    code = line_of_code(file, number)
    return f"{file}:{number}" + (f", {code}" if code else "")


def line_of_code(file: str, number: int) -> str:
    """A line of a file without its indentation; empty if the file cannot be read."""
    return linecache.getline(file, number).strip()
