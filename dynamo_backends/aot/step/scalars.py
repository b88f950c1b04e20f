"""Numbers that may change from step to step: inputs of the graph instead of constants in it.

Learning rates, betas and the like are Python numbers in an optimizer's `param_groups`. While a step
is captured each is a 0-d tensor, an element of one input of the graph. What Python code asks of
them (`if weight_decay != 0`) is answered with the values of now and remembered: a later step with
values that give another answer is captured anew.

Counters, the 0-d integer buffers of modules, may be asked yes-no questions in the same way, until
the step writes to them (`if self.n_averaged == 0`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dynamo_backends._torch_private import disable_current_modes

Values = Sequence[float]


@dataclass(frozen=True, eq=False)
class Term:
    """A number made of the values of a step, such as `1 - lr * weight_decay`.

    Attributes:
        function: What makes it; None for one of the values themselves.
        args: Its arguments, terms among them.
        kwargs: Likewise.
        index: Which value it is, if it is one.
        dtype: Of the value, if it is one; an integer type says that it is a counter.
    """

    function: Callable[..., Any] | None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    index: int = -1
    dtype: torch.dtype = torch.float64

    def evaluate(self, values: Values, known: dict["Term", Any] | None = None) -> Any:
        """The number for these values."""
        known = {} if known is None else known
        if self not in known:
            if self.function is None:
                known[self] = torch.tensor(values[self.index], dtype=self.dtype)
            else:
                args = [a.evaluate(values, known) if isinstance(a, Term) else a for a in self.args]
                kwargs = {
                    k: a.evaluate(values, known) if isinstance(a, Term) else a
                    for k, a in self.kwargs.items()
                }
                known[self] = self.function(*args, **kwargs)
        return known[self]

    def counters(self) -> Iterator[int]:
        """Which values it is made of that are counters."""
        if self.function is None and self.dtype is not torch.float64:
            yield self.index
        for a in (*self.args, *self.kwargs.values()):
            if isinstance(a, Term):
                yield from a.counters()


@dataclass(frozen=True)
class Answer:
    """What Python code was told of a term: `convert(term)` gave `value`."""

    term: Term
    convert: Callable[[Any], Any]
    value: Any

    def holds(self, values: Values) -> bool:
        """Whether the answer is the same for other values."""
        return bool(self.convert(self.term.evaluate(values)) == self.value)


class Scalars:
    """Which tensors of a trace are terms, and what has been asked of them.

    Args:
        numbers: Those of now.
        counters: What the counters are now.
    """

    def __init__(self, numbers: Sequence[float], counters: Sequence[int] = ()):
        self.values = tuple(numbers)
        self.answers: dict[tuple[Any, ...], Answer] = {}
        self._counters = tuple(counters)
        self._terms: dict[int, tuple[Tensor, Term]] = {}
        self._made: dict[tuple[Any, ...], Tensor] = {}
        self._known: dict[Term, Any] = {}

    def add(self, tensor: Tensor, index: int) -> None:
        """Makes a tensor of the trace known as the value number `index`."""
        self._terms[id(tensor)] = tensor, Term(None, index=index)

    def add_counter(self, tensor: Tensor, number: int) -> None:
        """Makes a tensor of the trace known as the counter of that number."""
        term = Term(None, index=len(self.values) + number, dtype=tensor.dtype)
        self._terms[id(tensor)] = tensor, term

    def forget(self, tensor: Tensor) -> None:
        """Before something is written to a tensor: if that is a counter, it is unknown then."""
        term = self.term(tensor)
        written = set(term.counters()) if term is not None else None
        if written:
            gone = [k for k, (_, t) in self._terms.items() if written.intersection(t.counters())]
            for key in gone:
                del self._terms[key]

    def term(self, value: Any) -> Term | None:
        """The term that a tensor of the trace is; None if it is none."""
        found = self._terms.get(id(value)) if isinstance(value, Tensor) else None
        return found[1] if found is not None else None

    def number(self, value: Any) -> Term | None:
        """As `term`, for what is made of numbers alone."""
        term = self.term(value)
        return term if term is not None and not any(True for _ in term.counters()) else None

    def are_all(self, tensors: Sequence[Tensor]) -> bool:
        """Whether there are tensors among the arguments and all of them are terms."""
        return bool(tensors) and all(id(t) in self._terms for t in tensors)

    def apply(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A function of terms: executed in the trace, once for equal arguments."""
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
            if any(True for _ in term.counters()):
                return result
            self._made[key] = result
        return self._made[key]

    def ask(self, term: Term, convert: Callable[[Any], Any]) -> Any:
        """What a term is now, as a Python value; remembered as an answer."""
        key = (term, convert)
        if key not in self.answers:
            with disable_current_modes(), torch._C.DisableTorchFunction():
                value = convert(term.evaluate((*self.values, *self._counters), self._known))
            self.answers[key] = Answer(term, convert, value)
        return self.answers[key].value


def _key(value: Any) -> Any:
    return value if isinstance(value, Term) else (type(value), repr(value))
