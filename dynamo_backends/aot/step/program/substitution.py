"""While a record is traced, fake tensors stand in for real ones, wherever code reads these.

Optimizers, and calls on what lives from step to step, have the real tensors; a torch function mode
hands the tensors of the trace to every call instead. So nothing has to be changed and put back.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from dynamo_backends._torch_private import (
    FakeTensor,
    FakeTensorMode,
    disable_current_modes,
    graph_being_traced,
    mark_backward_pass,
    setting_is_compiling,
    storage_id,
    unwrapped,
)
from dynamo_backends.aot.step.program import rewrites
from dynamo_backends.aot.step.program.optimizer_state import needs_capturable
from dynamo_backends.aot.step.program.scalars import PromotionRank, Scalars, as_item
from dynamo_backends.aot.step.record.abstract import fake_of
from dynamo_backends.aot.step.source_lines import name_of, user_line
from dynamo_backends.interface.errors import StepCaptureError

_T = torch.Tensor
_SET_DATA: Any = vars(torch._C.TensorBase)["data"].__set__

# What makes a Python value of a tensor, and the function that does so for a number's tensor.
_ASKS: dict[Callable[..., Any], Callable[[Any], Any]] = {
    _T.__bool__: bool, _T.item: as_item, _T.__float__: float, _T.__int__: int,
    _T.__index__: int, _T.tolist: as_item,
}  # fmt: skip


class Substitution(TorchFunctionMode):
    """Replaces real tensors by those of a trace.

    Attributes:
        scalars: Likewise.
        undeclared: Real tensors that nobody announced, in the order in which they were met.
        in_optimizer: An optimizer's step is running: numbers that it reads stay tensors.
    """

    def __init__(self, mode: FakeTensorMode, scalars: Scalars):
        super().__init__()
        self._mode = mode
        self.scalars = scalars
        self._fakes: dict[int, Tensor] = {}
        self._reals: dict[int, Tensor] = {}
        self._passes = itertools.count()
        self.undeclared: list[Tensor] = []
        self.in_optimizer = False
        self._reads_state = False

    def add(self, real: Tensor, fake: Tensor) -> None:
        """From now on `fake` stands in for `real`."""
        self._fakes[id(real)] = fake
        self._reals[id(fake)] = real

    def fake(self, real: Tensor) -> Tensor:
        """Returns what stands in for a tensor: itself if it is one of the trace."""
        if isinstance(real, FakeTensor) or isinstance(unwrapped(real), FakeTensor):
            return real
        fake = self._fakes.get(id(real))
        if fake is None:
            self.undeclared.append(real)
            fake = fake_of(self._mode, real)
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
        args, kwargs = pytree.tree_map_only(Tensor, self.fake, (args, kwargs or {}))
        if func in (_T.backward, torch.autograd.backward):
            _, nodes = call_and_collect_nodes(lambda: func(*args, **kwargs))
            return mark_backward_pass(nodes, next(self._passes))
        if func == _SET_DATA and id(args[0]) in self._reals:
            return self._set_data(*args)
        is_setter = getattr(func, "__name__", "") == "__set__" or func is _T.requires_grad_
        result = func(*args, **kwargs) if is_setter else self._call(func, args, kwargs)
        return self._reals.get(id(result), result) if isinstance(result, Tensor) else result

    @contextlib.contextmanager
    def inside_optimizer_step(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Marks, inside a `with` block, that an optimizer's step is being traced."""
        self.in_optimizer = True
        self._reads_state = needs_capturable(optimizer)
        try:
            with setting_is_compiling(self._reads_state):
                yield
        finally:
            self.in_optimizer = self._reads_state = False

    def all_fakes(self) -> list[Tensor]:
        """Returns all tensors of the trace that stand in for others."""
        return list(self._fakes.values())

    def _call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        scalars = self.scalars
        written = list(rewrites.mutated_tensors(func, args, kwargs))
        for target in written:
            scalars.forget(target)
        if func in _ASKS:
            return self._ask(func, args, kwargs)
        on_lists = rewrites.unroll_foreach(func, self._call)
        if on_lists is not None:
            return on_lists(*args, **kwargs)
        if func in rewrites.WITH_NUMBERS and any(map(self.is_number, pytree.tree_leaves(args))):
            return rewrites.WITH_NUMBERS[func](*args, **kwargs)
        if self._reads_state:
            args, kwargs = self._state_as_numbers(written, args, kwargs)
        for key in rewrites.NUMBERS & kwargs.keys():
            kwargs[key] = self._read_number(kwargs[key])
        aligned = scalars.align(_tensors(args, kwargs))
        if aligned:
            args, kwargs = pytree.tree_map_only(
                Tensor, lambda t: aligned.get(id(t), t), (args, kwargs)
            )
        tensors = _tensors(args, kwargs)
        others = [x for x in tensors if not self.is_number(x)]
        has_numbers = len(others) < len(tensors) and not self.in_optimizer
        scalars.check_division(func, args)
        compute = self._with_numbers if has_numbers else self._with_tensors
        return scalars.note(compute(func, args, kwargs), tensors)

    def _with_tensors(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        scalars = self.scalars
        if func in rewrites.NEW_INSTEAD and self.is_number(args[0]):
            func = rewrites.NEW_INSTEAD[func]
        if scalars.are_all(_tensors(args, kwargs)):
            # Numbers keep their precision until they meet a tensor.
            if func is _T.to and scalars.number(args[0]):
                return args[0]
            return scalars.apply(rewrites.OF_NUMBERS.get(func, func), args, kwargs)
        if func in rewrites.WITH_TENSORS and rewrites.has_tensor_number(kwargs):
            return rewrites.WITH_TENSORS[func](*args, **kwargs)
        if func in rewrites.POSITIONAL and any(map(self.is_number, (*args[1:], *kwargs.values()))):
            args, kwargs = self._in_dtype_of(args[0], args, kwargs)
            return rewrites.POSITIONAL[func](*args, **kwargs)
        return rewrites.IN_OTHER_WORDS.get(func, func)(*args, **kwargs)

    def _with_numbers(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call with numbers among its arguments; it gets their values if it takes no tensors."""
        with contextlib.suppress(_NotTaken), erasing_nodes_on_error():
            return self._with_tensors(func, args, kwargs)
        args, kwargs = pytree.tree_map_only(Tensor, self._value, (args, kwargs))
        return func(*args, **kwargs)

    def _value(self, tensor: Tensor) -> Any:
        term = self.scalars.number(tensor)
        return tensor if term is None else self.scalars.ask(term, float)

    def _set_data(self, target: Tensor, value: Tensor) -> None:
        """`p.data = value` as a copy into what `p` has: nobody else has that memory."""
        is_like = value.shape == target.shape and value.dtype is target.dtype
        shared = storage_id(value)
        others = (storage_id(t) for t in self._fakes.values())
        if not is_like or (shared != storage_id(target) and shared in others):
            raise StepCaptureError(
                f"the step sets the data of a tensor to {value.dtype}{list(value.shape)} (it was "
                f"{target.dtype}{list(target.shape)}), or to the storage of another tensor, at "
                f"{user_line()}. Copy the values (p.data.copy_(...)), set the data between two "
                'steps, or pass fallback="split".'
            )
        if value is not target:
            target.data.copy_(value.detach())

    def _ask(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        scalars, value = self.scalars, args[0]
        term = scalars.term(value)
        if self.in_optimizer and func is _T.item and value.is_floating_point():
            return scalars.as_number(value)
        if term is not None and (func is _T.__bool__ or scalars.number(value)):
            return scalars.ask(term, _ASKS[func])
        return self._read(func, args, kwargs)

    def _state_as_numbers(
        self, written: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Reads numbers out of 0-d state, as eager's formulas do."""
        kept = {id(t) for t in written}

        def read(t: Tensor) -> Tensor:
            is_state = id(t) in self._reals and self.scalars.term(t) is None
            is_read = is_state and not t.ndim and t.is_floating_point() and id(t) not in kept
            return self.scalars.as_number(t) if is_read else t

        changed: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(
            Tensor, read, (args, kwargs)
        )
        return changed

    def is_number(self, value: Any) -> bool:
        """Returns whether a value is a tensor that stands for a number."""
        return isinstance(value, Tensor) and self.scalars.rank(value) is not PromotionRank.TENSOR

    def _in_dtype_of(
        self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not x.is_floating_point():
            return args, kwargs
        changed: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(
            lambda a: a.to(x.dtype) if self.is_number(a) else a, (args, kwargs)
        )
        return changed

    def _read_number(self, value: Any) -> Any:
        """A hyper-parameter in the place of an argument that is a number, as torch reads it."""
        is_term = isinstance(value, Tensor) and self.scalars.term(value) is not None
        return self.scalars.as_number(value) if is_term else value

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return func(*args, **kwargs)  # constants have a value in the trace, too
        except Exception as error:
            raise StepCaptureError(
                f"the step reads the value of a tensor in Python ({name_of(func)}) at "
                f"{user_line()}. Python branches and prints on tensor values are not supported "
                "inside a compiled step. Return the tensor and read it afterwards, use torch.where "
                'instead of `if`, or pass fallback="split" to run the rest of the step in eager.'
            ) from error


class _NotTaken(Exception):
    """A function does not take a tensor for a number."""


@contextlib.contextmanager
def erasing_nodes_on_error() -> Iterator[None]:
    """Erases the nodes that a failed call left in the graph (context manager).

    Raises:
        _NotTaken: It failed. Each function has its own kind of error if it is given a tensor.
    """
    graph = graph_being_traced()
    last = next(iter(reversed(graph.nodes)))
    with disable_current_modes(), torch._C.DisableTorchFunction():
        state = torch.get_rng_state()
    try:
        yield
    except StepCaptureError:
        raise
    except Exception as error:
        for node in list(itertools.takewhile(lambda n: n is not last, reversed(graph.nodes))):
            if node.is_impure():
                raise  # it has written to something
            graph.erase_node(node)
        with disable_current_modes(), torch._C.DisableTorchFunction():
            torch.set_rng_state(state)
        raise _NotTaken from error


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    return [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]


def call_and_collect_nodes(call: Callable[[], Any]) -> tuple[Any, list[fx.Node]]:
    """Calls a function under tracing; returns its result and the new FX nodes."""
    graph = graph_being_traced()
    last = next(iter(reversed(graph.nodes)))  # torch 2.12 needs the iter()
    result = call()
    return result, list(itertools.takewhile(lambda n: n is not last, reversed(graph.nodes)))
