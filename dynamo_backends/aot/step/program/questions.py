"""What a step was told about its numbers (`weight_decay != 0`), as a graph that asks it again."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import make_fx
from dynamo_backends.aot.step.program.scalars import Answer, Term


def asked(answers: Sequence[Answer], values: Sequence[float]) -> fx.GraphModule:
    """Returns a graph of ATen calls from the numbers, in float64, to what each answer is about.

    Args:
        answers: About numbers alone.
        values: The numbers of now.
    """

    def terms(numbers: Tensor) -> list[Tensor]:
        known: dict[Term, Any] = {}
        return [_value(answer.term, numbers, known) for answer in answers]

    return make_fx(terms, None)(torch.tensor(values, dtype=torch.float64))


def _value(term: Term, numbers: Tensor, known: dict[Term, Any]) -> Any:
    if term not in known:
        if term.function is None:
            known[term] = numbers[term.index].to(term.dtype)
        else:
            args = [_argument(x, numbers, known) for x in term.args]
            kwargs = {key: _argument(x, numbers, known) for key, x in term.kwargs.items()}
            known[term] = term.function(*args, **kwargs)
    return known[term]


def _argument(value: Any, numbers: Tensor, known: dict[Term, Any]) -> Any:
    return _value(value, numbers, known) if isinstance(value, Term) else value


def numbers_of(answer: Answer) -> set[int]:
    """Positions of the numbers that an answer is about."""
    found: set[int] = set()
    left: list[Any] = [answer.term]
    while left:
        term = left.pop()
        if isinstance(term, Term):
            found.update([term.index] if term.function is None else [])
            left += [*term.args, *term.kwargs.values()]
    return found
