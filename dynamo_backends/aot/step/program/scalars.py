"""Numbers that may change from step to step: inputs of the graph instead of constants in it.

Learning rates, betas and the like are Python numbers in an optimizer's `param_groups`. While a step
is captured each is a 0-d tensor, an element of one input of the graph. What Python code asks of
them (`if weight_decay != 0`) is answered with the values of now and remembered: a later step with
values that give another answer is captured anew.

Hyper-parameters that are 0-d tensors live on, and may be asked yes-no questions in the same way,
until the step writes to them.

What a tensor that stands for a number makes of another tensor's dtype is what the number would. A
Python number adapts to whatever it meets; a numpy scalar adapts to tensors and outweighs Python
numbers (NEP 50); a tensor outweighs both, also one of 0 dimensions. Tensors that stand for numbers
are all of 0 dimensions, of float64 for Python numbers, so that they keep their precision.
"""

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor

from dynamo_backends._torch_private import disable_current_modes


class PromotionRank(enum.IntEnum):
    """Ranks scalars for type promotion: Python number, NumPy scalar, 0-d tensor."""

    PYTHON = 0
    NUMPY = 1
    TENSOR = 2


def promotion_rank(value: Any) -> PromotionRank:
    """Returns the type-promotion rank of a number among a step's inputs."""
    return PromotionRank.NUMPY if isinstance(value, numpy.generic) else PromotionRank.PYTHON


def dtype_of(value: Any) -> torch.dtype:
    """Returns the dtype of the tensor that stands for a number."""
    if not isinstance(value, numpy.floating):
        return torch.float64
    return {2: torch.float16, 4: torch.float32}.get(value.dtype.itemsize, torch.float64)


def common_dtype(tensors: Sequence[Tensor]) -> torch.dtype | None:
    """Returns the dtype to which numbers are cast beside these tensors; None: torch's promotion."""
    if any(t.ndim and t.dtype.is_floating_point | t.dtype.is_complex for t in tensors):
        return None
    dtype = tensors[0].dtype
    for t in tensors[1:]:
        dtype = torch.promote_types(dtype, t.dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.get_default_dtype()
    return dtype.to_real()


Values = Sequence[Any] | Tensor

_REVERSED = {torch.Tensor.__rtruediv__, torch.Tensor.__rdiv__}
_DIVISIONS = {
    torch.div, torch.true_divide, torch.Tensor.div, torch.Tensor.true_divide,
    torch.Tensor.__truediv__, *_REVERSED,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Term:
    """Represents a symbolic scalar expression of a step, such as `1 - lr * weight_decay`.

    Attributes:
        function: What makes it; None for one of the values themselves.
        args: Its arguments, terms among them.
        kwargs: Likewise.
        index: Which value it is, if it is one.
        dtype: Dtype of the value, if it is one.
        lives: Whether the value is read out of a tensor that lives on.
    """

    function: Callable[..., Any] | None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    index: int = -1
    dtype: torch.dtype = torch.float64
    lives: bool = False

    def evaluate(self, values: Values, known: dict["Term", Any] | None = None) -> Any:
        """Returns the number for these values."""
        known = {} if known is None else known
        if self not in known:
            if self.function is None:
                known[self] = torch.as_tensor(values[self.index], dtype=self.dtype)
            else:
                args = [a.evaluate(values, known) if isinstance(a, Term) else a for a in self.args]
                kwargs = {
                    k: a.evaluate(values, known) if isinstance(a, Term) else a
                    for k, a in self.kwargs.items()
                }
                known[self] = self.function(*args, **kwargs)
        return known[self]

    def leaves(self) -> Iterator["Term"]:
        """Yields the values that it is made of."""
        if self.function is None:
            yield self
        for a in (*self.args, *self.kwargs.values()):
            if isinstance(a, Term):
                yield from a.leaves()

    def living(self) -> Iterator[int]:
        """Yields which of these values are read out of tensors."""
        return (leaf.index for leaf in self.leaves() if leaf.lives)


@dataclass(frozen=True)
class ScalarGuard:
    """Guards on a scalar: `convert(term)` gave `value` when the step was traced."""

    term: Term
    convert: Callable[[Any], Any]
    value: Any

    def holds(self, values: Values) -> bool:
        """Returns whether the answer is the same for other values."""
        return bool(self.convert(self.term.evaluate(values)) == self.value)


class Scalars:
    """The terms and numbers of a trace, and what Python code has asked of them.

    Args:
        numbers: Those of now: Python numbers and numpy scalars.
        living: The values of now of the tensors that may be asked, one element each.
    """

    def __init__(self, numbers: Sequence[Any], living: Sequence[Any] = ()):
        self.values = tuple(numbers)
        self.answers: dict[tuple[Any, ...], ScalarGuard] = {}
        self._living = tuple(living)
        self._terms: dict[int, tuple[Tensor, Term]] = {}
        self._ranks: dict[int, tuple[Tensor, PromotionRank]] = {}
        self._made: dict[tuple[Any, ...], Tensor] = {}
        self._known: dict[Term, Any] = {}

    def add(self, tensor: Tensor, index: int) -> Tensor:
        """Makes the value number `index` known, an element of an input of the graph.

        Returns:
            The tensor that stands for it.
        """
        value = self.values[index]
        if tensor.dtype is torch.float64:  # else it is an integer
            tensor = tensor.to(dtype_of(value))
        self._terms[id(tensor)] = tensor, Term(None, index=index, dtype=tensor.dtype)
        self._ranks[id(tensor)] = tensor, promotion_rank(value)
        return tensor

    def add_living(self, tensor: Tensor, number: int) -> None:
        """Makes a tensor of the trace known as the living one of that number."""
        term = Term(None, index=len(self.values) + number, dtype=tensor.dtype, lives=True)
        self._terms[id(tensor)] = tensor, term

    def forget(self, tensor: Tensor) -> None:
        """Before something is written to a tensor: if that lives on, its value is unknown then."""
        term = self.term(tensor)
        written = set(term.living()) if term is not None else None
        if written:
            gone = [k for k, (_, t) in self._terms.items() if written.intersection(t.living())]
            for key in gone:
                del self._terms[key]

    def term(self, value: Any) -> Term | None:
        """Returns the term that a tensor of the trace is; None if it is none."""
        found = self._terms.get(id(value)) if isinstance(value, Tensor) else None
        return found[1] if found is not None else None

    def number(self, value: Any) -> Term | None:
        """As `term`, for what is made of numbers alone."""
        term = self.term(value)
        return term if term is not None and not any(True for _ in term.living()) else None

    def rank(self, value: Any) -> PromotionRank:
        """Returns what a tensor of the trace stands for, or what a number is."""
        if not isinstance(value, Tensor):
            return promotion_rank(value)
        found = self._ranks.get(id(value))
        return found[1] if found is not None else PromotionRank.TENSOR

    def are_all(self, tensors: Sequence[Tensor]) -> bool:
        """Returns whether there are tensors among the arguments and all of them are terms."""
        return bool(tensors) and all(id(t) in self._terms for t in tensors)

    def as_number(self, tensor: Tensor) -> Tensor:
        """Returns what stands for `tensor.item()`."""
        if self.rank(tensor) is PromotionRank.PYTHON:
            return tensor
        result: Tensor = (
            self.apply(torch.Tensor.double, (tensor,), {})
            if id(tensor) in self._terms
            else tensor.double()
        )
        self._ranks[id(result)] = result, PromotionRank.PYTHON
        return result

    def align(self, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """Returns by id what replaces those tensors of a call that are numbers.

        Without it, a number would promote a 0-d tensor of float32 to float64.
        """
        ranks = [self.rank(t) for t in tensors]
        top = max(ranks, default=PromotionRank.TENSOR)
        if top is min(ranks, default=top):
            return {}
        dtype = common_dtype([t for t, rank in zip(tensors, ranks, strict=True) if rank is top])
        return {
            id(t): self._cast(t, dtype)
            for t, rank in zip(tensors, ranks, strict=True)
            if rank is not top and dtype is not None and t.dtype.is_floating_point
        }

    def _cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if tensor.dtype is dtype:
            return tensor
        if id(tensor) in self._terms:
            result: Tensor = self.apply(torch.Tensor.to, (tensor, dtype), {})
        else:
            result = tensor.to(dtype)
        self._ranks[id(result)] = result, self.rank(tensor)
        return result

    def note(self, result: Any, tensors: Sequence[Tensor]) -> Any:
        """After a call on these tensors: numbers made of numbers are numbers."""
        if isinstance(result, Tensor) and not result.ndim and tensors:
            rank = max(map(self.rank, tensors))
            if rank is not PromotionRank.TENSOR:
                self._ranks.setdefault(id(result), (result, rank))
        return result

    def apply(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Returns a function of terms: executed in the trace, once for equal arguments."""
        numbers = all(self.number(a) for a in args if isinstance(a, Tensor))
        if numbers and (function in _DIVISIONS or any(isinstance(a, float) for a in args)):
            args = tuple(self._double(a) for a in args)
        term = Term(
            function,
            tuple(self.term(a) or a for a in args),
            {k: self.term(a) or a for k, a in kwargs.items()},
        )
        key = (function, *map(_key, term.args), *((k, _key(a)) for k, a in term.kwargs.items()))
        if key not in self._made:
            result = function(*args, **kwargs)
            if not isinstance(result, Tensor) or result.ndim:
                return result
            self._terms[id(result)] = result, term
            if any(True for _ in term.living()):
                return result
            self._made[key] = result
        return self._made[key]

    def _double(self, value: Any) -> Any:
        """Python calculates with integers and floats in float64."""
        if not isinstance(value, Tensor) or value.dtype is not torch.int64:
            return value
        return self.apply(torch.Tensor.double, (value,), {})

    def check_division(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Raises where Python would, for a division of numbers by one that is 0 now.

        One of tensors would go on with infinity.
        """
        if function not in _DIVISIONS:
            return
        divisor = args[0] if function in _REVERSED else args[1]
        term = self.term(divisor)
        is_pythons = all(self.rank(a) is PromotionRank.PYTHON for a in args)
        if term is not None and is_pythons and self.ask(term, _is_zero):
            raise ZeroDivisionError("division by zero")

    def ask(self, term: Term, convert: Callable[[Any], Any]) -> Any:
        """Returns what a term is now, as a Python value; remembered as an answer."""
        key = (term, convert)
        if key not in self.answers:
            with disable_current_modes(), torch._C.DisableTorchFunction():
                value = convert(term.evaluate((*self.values, *self._living), self._known))
            self.answers[key] = ScalarGuard(term, convert, value)
        return self.answers[key].value


def _key(value: Any) -> Any:
    return value if isinstance(value, Term) else (type(value), repr(value))


def as_item(value: Any) -> Any:
    """Returns the Python value of a 0-d tensor."""
    return value.item()


def _is_zero(value: Any) -> bool:
    return bool(value == 0)


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "bool": bool, "float": float, "int": int, "item": as_item, "zero": _is_zero,
}  # fmt: skip
"""What Python code asks of a number, by names for files."""
