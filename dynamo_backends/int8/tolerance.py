"""Defines the tolerance of results in int8, in terms of the task, and measures it."""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dynamo_backends.interface.errors import OptionError, brief_error
from dynamo_backends.verify.mismatch import (
    describe_layout_mismatch,
    describe_nonfinite_mismatch,
    is_inexact,
)

_TIMES, _LEAST_SCALE = 5, 0.01
"""Mean lengths may differ by this many times `1 - cosine` (0.99: 5%), at least by 1%."""

Metric = Callable[[list[Any], list[Any]], Any]
"""From eager's outputs and the results of one batch to a number, of which more is better."""

COSINE, RELATIVE = "cosine", "relative"

HOW = (
    'tolerance={"cosine": 0.99} (lowest mean cosine similarity to eager\'s results), '
    'tolerance={"relative": 0.05} (highest root mean square error, relative to the results), or '
    "tolerance={metric: 0.98}, where metric(expected, results) is a function that takes the lists "
    "of a batch's outputs and returns a number, and 0.98 is its lowest allowed mean"
)
"""How a tolerance is stated, for texts of errors."""


@dataclass(frozen=True)
class Tolerance:
    """Bounds of what is measured; all of them have to hold.

    Attributes:
        bounds: "cosine", "relative" or a function, each with its bound.
    """

    bounds: tuple[tuple[str | Metric, float], ...]

    @classmethod
    def parse(cls, given: Any, backend: str) -> "Tolerance":
        """Returns a tolerance as a user writes it.

        Args:
            given: A mapping, or a tolerance.
            backend: For the text of the error.

        Raises:
            OptionError: It is none.
        """
        if isinstance(given, Tolerance):
            return given
        if not isinstance(given, Mapping) or not given:
            raise OptionError(f"option 'tolerance' of {backend} must be {HOW}; not {given!r}.")
        for measure, bound in given.items():
            _check(measure, bound, backend)
        return cls(tuple((measure, float(bound)) for measure, bound in given.items()))

    def __repr__(self) -> str:
        """As a user writes it; functions by their names and what they compute."""
        shown = (f"{_mark(measure)}: {bound:g}" for measure, bound in self.bounds)
        return "{" + ", ".join(shown) + "}"

    def __str__(self) -> str:
        """Returns the bounds in words."""
        return ", ".join(
            f"{name_of(m)} {'at most' if m == RELATIVE else 'at least'} {b:g}"
            for m, b in self.bounds
        )

    def __deepcopy__(self, memo: Any) -> "Tolerance":
        """Itself: it never changes."""
        return self

    @property
    def judges_all(self) -> bool:
        """Returns whether a function of the user judges all outputs, integers included."""
        return any(callable(measure) for measure, _ in self.bounds)


def _check(measure: Any, bound: Any, backend: str) -> None:
    if measure not in (COSINE, RELATIVE) and not callable(measure):
        raise OptionError(f"option 'tolerance' of {backend} names {measure!r}; it must be {HOW}.")
    number = isinstance(bound, int | float) and not isinstance(bound, bool)
    if not number or not math.isfinite(bound):
        raise OptionError(
            f"the bound of {name_of(measure)} in the option 'tolerance' of {backend} must be a "
            f"number, not {bound!r}."
        )
    if measure == COSINE and not 0 < bound <= 1:
        raise OptionError(
            f"the bound of cosine in the option 'tolerance' of {backend} must be more than 0 and "
            f"at most 1, not {bound!r}."
        )
    if measure == RELATIVE and not bound > 0:
        raise OptionError(
            f"the bound of relative in the option 'tolerance' of {backend} must be more than 0, "
            f"not {bound!r}."
        )


def name_of(measure: str | Metric) -> str:
    """Returns what a measure is called in reports."""
    if isinstance(measure, str):
        return measure
    return str(getattr(measure, "__name__", type(measure).__name__))


def _mark(measure: str | Metric) -> str:
    """A measure for keys of what was decided by it: of functions, also what they compute."""
    code = getattr(measure, "__code__", None)
    if isinstance(measure, str) or code is None:
        return repr(measure)
    text = f"{code.co_code!r} {code.co_consts!r} {code.co_names!r}"
    return f"{name_of(measure)} {hashlib.sha256(text.encode()).hexdigest()[:12]}"


class Scores:
    """The measures of the results of several batches.

    Args:
        tolerance: What is measured, and the bounds.
    """

    def __init__(self, tolerance: Tolerance):
        self._tolerance = tolerance
        self._cosines: dict[int, list[Tensor]] = {}
        self._lengths: dict[int, list[Tensor]] = {}
        self._errors: dict[int, list[tuple[float, float]]] = {}
        self._metrics: dict[int, list[float]] = {}
        self._wrong = ""

    def add(self, expected: Sequence[Any], results: Sequence[Any]) -> None:
        """Adds the measures of one batch.

        Args:
            expected: Eager's outputs in float32.
            results: The ones in question.
        """
        self._wrong = self._wrong or _kind_difference(expected, results, self._tolerance)
        if self._wrong:
            return
        for place, (e, r) in enumerate(zip(expected, results, strict=True)):
            if isinstance(e, Tensor) and is_inexact(e) and e.numel():
                self._add_output(place, e, r)
        for place, (measure, _) in enumerate(self._tolerance.bounds):
            if callable(measure):
                self._add_metric(place, measure, expected, results)

    def _add_output(self, place: int, expected: Tensor, result: Tensor) -> None:
        finite = expected.isfinite()
        rows = [_rows(torch.where(finite, x, 0)) for x in (expected, result)]
        e, r = rows
        lengths = e.norm(dim=1), r.norm(dim=1)
        product = (e * r).sum(dim=1)
        both = lengths[0] * lengths[1]
        same = (lengths[0] == lengths[1]).to(e.dtype)  # of rows that are zero
        self._cosines.setdefault(place, []).append(torch.where(both > 0, product / both, same))
        times = torch.where(lengths[0] > 0, lengths[1] / lengths[0], 2 - same)
        self._lengths.setdefault(place, []).append(times)
        squares = float((e - r).square().sum()), float(e.square().sum())
        self._errors.setdefault(place, []).append(squares)

    def _add_metric(
        self, place: int, metric: Metric, expected: Sequence[Any], results: Sequence[Any]
    ) -> None:
        try:
            value = float(metric(list(expected), list(results)))
        except Exception as error:
            self._wrong = f"the metric {name_of(metric)} failed ({brief_error(error)})"
            return
        self._metrics.setdefault(place, []).append(value)

    @property
    def measured(self) -> dict[str, float]:
        """By its name, what each measure came to: of the worst output."""
        found: dict[str, float] = {}
        for place, (measure, _) in enumerate(self._tolerance.bounds):
            value = self._value(place, measure)
            if value is not None:
                found[name_of(measure)] = value
        return found

    def _value(self, place: int, measure: str | Metric) -> float | None:
        if callable(measure):
            values = self._metrics.get(place)
            return sum(values) / len(values) if values else None
        if measure == COSINE:
            return min((float(torch.cat(c).mean()) for c in self._cosines.values()), default=None)
        return max(map(_relative, self._errors.values()), default=None)

    @property
    def wrong(self) -> str:
        """Returns which bound does not hold, in words; empty if all do."""
        if self._wrong:
            return self._wrong
        for place, (measure, bound) in enumerate(self._tolerance.bounds):
            value = self._value(place, measure)
            name = name_of(measure)
            if value is None:
                return f"{name} cannot be computed, because there is no floating-point output"
            if measure == RELATIVE and not value <= bound:
                return f"a relative error of {value:.3g} exceeds the tolerance of {bound:g}"
            if measure != RELATIVE and not value >= bound:
                text = (
                    f"a mean {name} of {value:.4f}" if measure == COSINE else f"{name} {value:.4g}"
                )
                return f"{text} is below the tolerance of {bound:g}"
            if measure == COSINE and (text := self._scaled(bound)):
                return text
        return ""

    @property
    def is_sure(self) -> bool:
        """Returns whether the mean cosine of other samples is within the bound with 97% likelihood.

        Of other measures the mean of few batches says nothing about that.
        """
        bound = next((b for m, b in self._tolerance.bounds if m == COSINE), None)
        if bound is None:
            return True
        for cosines in map(torch.cat, self._cosines.values()):
            error = float(cosines.std()) / math.sqrt(len(cosines)) if len(cosines) > 1 else 0.0
            if float(cosines.mean()) - 2 * error < bound:
                return False
        return True

    def _scaled(self, cosine: float) -> str:
        """A wrong scale changes no angle, so lengths have to agree as well.

        Errors that are nobody's fault make results about `1 - cosine` longer in the mean.
        """
        most = max(_LEAST_SCALE, _TIMES * (1 - cosine))
        off = max((float(torch.cat(x).mean()) - 1 for x in self._lengths.values()), key=abs)
        if abs(off) <= most:
            return ""
        return (
            f"result vectors are {abs(off):.1%} {'longer' if off > 0 else 'shorter'} than eager's "
            f"on average, and the tolerance for a cosine of {cosine:g} is {most:.1%}"
        )


def _rows(tensor: Tensor) -> Tensor:
    """Returns one row of numbers for each sample; what has no samples is one row."""
    wide = torch.view_as_real(tensor).double() if tensor.is_complex() else tensor.double()
    return wide.reshape(1, -1) if tensor.ndim < 2 else wide.reshape(len(wide), -1)


def _relative(squares: Sequence[tuple[float, float]]) -> float:
    error, size = (math.sqrt(sum(column)) for column in zip(*squares, strict=True))
    if not size:
        return math.inf if error else 0.0
    return error / size


def _kind_difference(expected: Sequence[Any], results: Sequence[Any], tolerance: Tolerance) -> str:
    """Returns what is wrong under any tolerance: number, dtypes, NaN, unequal integers."""
    if len(expected) != len(results):
        return f"{len(results)} outputs instead of {len(expected)}"
    for i, (e, r) in enumerate(zip(expected, results, strict=True)):
        strides = r.stride() if isinstance(r, Tensor) and r.layout == torch.strided else None
        if wrong := describe_layout_mismatch(e, r, strides) or describe_nonfinite_mismatch(e, r):
            return f"output {i} {wrong}"
        counts = isinstance(e, Tensor) and not is_inexact(e) and not tolerance.judges_all
        if counts and not torch.equal(e, r):
            return (
                f"output {i} differs in {int((e != r).sum())} elements that are not floating-point "
                "numbers; only a metric function can define a tolerance for them"
            )
    return ""
