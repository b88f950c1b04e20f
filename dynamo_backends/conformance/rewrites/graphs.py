"""Random graphs and their inputs: made from a seed, run in eager or float64, written as Python."""

import dataclasses
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynamo_backends.conformance.rewrites.operators import (
    FLOATS,
    INTEGERS,
    OPERATORS,
    SHIFTS,
    Operator,
)

_INF, _NAN = float("inf"), float("nan")


class Input(NamedTuple):
    """An input of a random graph.

    Attributes:
        name: Name of the parameter.
        shape: Its shape.
        dtype: Its dtype.
        least: The least position, where it has positions.
        size: Positions are below this; 0: it has other numbers.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    least: int = 0
    size: int = 0


MODERATE = (0.0, -0.0, 18.5, -18.5, 20.0, -20.0, 88.0, -88.0, 89.5, 100.0, -100.0, 120.0, -120.0,
            1.0, -1.0, 0.5, 1e-7, -1e-7, 1e-20, 10.4, 1000.0, -1000.0)  # fmt: skip
FINITE = (*MODERATE, 65520.0, -65520.0, 70000.0, 16777217.0, -16777217.0, 1e20, -1e20, -1e-20, 1e30,
          -1e30, 1e-30, 1e-40, -1e-40, 0.99999994, 2147483648.0)  # fmt: skip
EXTREME = (*FINITE, _INF, -_INF, _NAN)

MEANS = (1000.0, -1e4, 1e6)

FILLS = ("mixed", "finite", "moderate", "planted", "rows", "mean")
"""How a tensor is filled.

Elements are extreme, finite or moderate; one in each row is extreme; rows have equal elements;
random numbers have a large mean.
"""


def usual(given: Input, seed: int) -> Tensor:
    """Values of a first call: `torch.randn`, small integers, any positions."""
    generator = torch.Generator().manual_seed(seed + sum(map(ord, given.name)))
    if given.size:
        return torch.randint(given.least, given.size, given.shape, generator=generator)
    if given.dtype == torch.bool:
        return torch.rand(given.shape, generator=generator) < 0.5
    if given.dtype.is_floating_point:
        return torch.randn(given.shape, generator=generator).to(given.dtype)
    least = 0 if given.dtype == torch.uint8 else -10
    return torch.randint(least, 11, given.shape, generator=generator).to(given.dtype)


def extreme(given: Input, fill: str, seed: int) -> Tensor:
    """Values of a later call.

    Args:
        given: The input.
        fill: One of `FILLS`.
        seed: Which ones.
    """
    choose = random.Random(f"{seed} {given.name} {fill}")
    known = _known(given, fill)
    values = usual(given, seed + 1)
    if not known:
        return values
    if fill == "mean" and given.dtype.is_floating_point:
        return values + choose.choice(MEANS)
    flat = values.view(-1, values.shape[-1]) if values.dim() else values.view(1, 1)
    for row in flat:
        if fill == "planted":
            row[choose.randrange(len(row))] = choose.choice(known)
        elif fill == "rows":
            row.fill_(choose.choice(known))
        else:
            row.copy_(torch.tensor([choose.choice(known) for _ in row], dtype=given.dtype))
    return values


def _known(given: Input, fill: str) -> Sequence[float]:
    if given.dtype == torch.bool:
        return ()
    if given.size:
        return (given.least, given.size - 1, 0)
    if given.dtype.is_floating_point:
        return {"finite": FINITE, "moderate": MODERATE}.get(fill, EXTREME)
    info = torch.iinfo(given.dtype)
    wide = (0, -1, 1, 2, 7, -8, 31, 127, 128, 255, 2**24 + 1, 2**31 - 1, 2**31 + 5, 2**53 + 1)
    near = () if fill == "moderate" else (info.min, info.max, info.min + 1, info.max - 1)
    return (*near, *(n for n in wide if info.min <= n <= info.max))


Values = dict[str, Tensor]

_SHAPES = ((4, 6), (3, 8), (2, 3, 4), (5,), (2, 16), (8, 8), (1, 6))
_DTYPES = (torch.float32,) * 7 + (torch.int32, torch.int64, torch.uint8, torch.int8)
_MOST_ELEMENTS = 512
_MOST_INPUTS = 4
_TRIES = 60  # until an operator accepts a value
_PAIRS = 4  # times as likely as others: operators with an inverse
_INVERTED = 0.6  # of them are followed by it
_OFTEN = {"inverse pairs": 4, "constants": 3, "two values": 2, "casts": 2}
_EXACT = {row.template for rows in OPERATORS.values() for row in rows if row.moves}
_GLOBALS = {"torch": torch, "F": torch.nn.functional}


@dataclass(frozen=True)
class Call:
    """One call of a random graph.

    Attributes:
        result: The name of its value.
        template: See `Operator.template`.
        operands: The text of each field of the template: names of values, and constants.
        moves: See `Operator.moves`.
    """

    result: str
    template: str
    operands: Mapping[str, str]
    moves: bool = False

    @property
    def text(self) -> str:
        """The call in Python."""
        return self.template.format(**self.operands)


@dataclass(frozen=True)
class RandomGraph:
    """Inputs, calls, and the names of the values that are returned."""

    inputs: tuple[Input, ...]
    calls: tuple[Call, ...]
    outputs: tuple[str, ...]

    def source(self) -> str:
        """Returns a function `f` in Python."""
        names = ", ".join(x.name for x in self.inputs)
        lines = [f"    {call.result} = {call.text}" for call in self.calls]
        return "\n".join([f"def f({names}):", *lines, f"    return [{', '.join(self.outputs)}]"])

    def function(self) -> Callable[..., list[Tensor]]:
        """Returns the function, to be compiled."""
        namespace: dict[str, Any] = dict(_GLOBALS)
        exec(self.source(), namespace)
        function: Callable[..., list[Tensor]] = namespace["f"]
        return function

    def returning(self, name: str) -> "RandomGraph":
        """Returns the graph that computes one of the values."""
        return dataclasses.replace(self, outputs=(name,)).without_dead_code()

    def run(self, inputs: Mapping[str, Tensor]) -> Values:
        """Returns all values that the graph computes from inputs, in eager."""
        values = dict(inputs)
        for call in self.calls:
            values[call.result] = evaluate(call, values)
        return values

    def run_in_float64(self, values: Mapping[str, Tensor]) -> Values:
        """Returns the same in float64; casts to float16 and bfloat16 stay what they are."""
        wide = {n: x.double() if x.dtype == torch.float32 else x for n, x in values.items()}
        for call in self.calls:
            wide[call.result] = evaluate(call, wide, wide=True)
        return wide

    def without_dead_code(self) -> "RandomGraph":
        """Returns the calls and inputs that outputs depend on."""
        needed = set(self.outputs)
        calls: list[Call] = []
        for call in reversed(self.calls):
            if call.result in needed:
                calls.append(call)
                needed |= set(call.operands.values())
        inputs = tuple(x for x in self.inputs if x.name in needed)
        return dataclasses.replace(self, inputs=inputs, calls=tuple(reversed(calls)))


def evaluate(call: Call, values: Mapping[str, Tensor], wide: bool = False) -> Tensor:
    """Returns the value of one call.

    Args:
        call: The call.
        values: At least its operands.
        wide: Casts to float32 are casts to float64.
    """
    text = call.text.replace(".float()", ".double()") if wide else call.text
    result: Tensor = eval(text, _GLOBALS, dict(values))
    return result


def random_graph(seed: int) -> RandomGraph:
    """Returns the graph of a seed: two to six calls, all of which eager accepts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _Generator(random.Random(f"rewrites {seed}")).graph()


class _Generator:
    def __init__(self, choose: random.Random):
        self.choose = choose
        self.inputs: list[Input] = []
        self.calls: list[Call] = []
        self.values: Values = {}
        self._inverses: dict[str, tuple[Operator, Mapping[str, str]]] = {}

    def graph(self) -> RandomGraph:
        self._new_input(self.choose.choice(_SHAPES), self.choose.choice(_DTYPES))
        count = self.choose.randint(2, 6)
        while len(self.calls) < count:
            for _ in range(_TRIES):
                if self._add_call():
                    break
            else:
                break
        names = [call.result for call in self.calls]
        outputs = [names[-1]]
        if len(names) > 2 and self.choose.random() < 0.25:
            outputs.insert(0, self.choose.choice(names[:-1]))
        graph = RandomGraph(tuple(self.inputs), tuple(self.calls), tuple(outputs))
        return graph.without_dead_code()

    def _new_input(
        self, shape: Sequence[int], dtype: torch.dtype, least: int = 0, size: int = 0
    ) -> str:
        name = f"x{len(self.inputs)}"
        self.inputs.append(Input(name, tuple(shape), dtype, least, size))
        self.values[name] = usual(self.inputs[-1], 0)
        return name

    def _add_call(self) -> bool:
        inputs, values = list(self.inputs), dict(self.values)
        name = list(values)[-1] if not self.calls else self.calls[-1].result
        if self.choose.random() < 0.2:
            name = self.choose.choice([n for n, v in values.items() if not _is_position(n, inputs)])
        operator, operands = self._operator(name)
        if operator is None:
            return False
        for field in _fields(operator.template):
            text = operands.get(field) or self._operand(field, name)
            if text is None:
                self.inputs, self.values = inputs, values
                return False
            operands[field] = text
        call = Call(f"v{len(self.calls)}", operator.template, operands, operator.moves)
        try:
            result = evaluate(call, self.values)
        except (RuntimeError, IndexError, TypeError, ValueError):
            result = None
        if result is None or not 0 < result.numel() <= _MOST_ELEMENTS or result.is_complex():
            self.inputs, self.values = inputs, values
            return False
        self.calls.append(call)
        self.values[call.result] = result
        self._inverses[call.result] = (operator, operands)
        return True

    def _operator(self, name: str) -> tuple[Operator | None, dict[str, str]]:
        """Returns what is called on a value: what undoes the call before, or anything."""
        value = self.values[name]
        before, operands = self._inverses.get(name, (None, {}))
        if before is not None and before.inverses and self.choose.random() < _INVERTED:
            template = self.choose.choice(before.inverses)
            given = {field: text for field, text in operands.items() if field not in ("x", "b")}
            return Operator(template, "", moves=template in _EXACT), {**given, "x": name}
        kind = _kind(value)
        subjects = list(OPERATORS)
        subject = self.choose.choices(subjects, [_OFTEN.get(s, 1) for s in subjects])[0]
        rows = [row for row in OPERATORS[subject] if kind in row.takes and value.dim() >= row.dims]
        if not rows:
            return None, {}
        weights = [_PAIRS if row.inverses else 1 for row in rows]
        return self.choose.choices(rows, weights)[0], {"x": name}

    def _operand(self, field: str, name: str) -> str | None:
        """Returns the text of a field of a template whose x is the named value."""
        value, choose = self.values[name], self.choose
        if field in ("c", "k", "n"):
            return choose.choice({"c": FLOATS, "k": INTEGERS, "n": SHIFTS}[field])
        if field == "d":
            return str(choose.randrange(value.dim())) if value.dim() else None
        if field in ("i", "j"):
            size = value.shape[-1]
            shape = value.shape if field == "j" else (3,)
            return self._input(shape, torch.int64, -size if field == "i" else 0, size)
        dtype = torch.bool if field == "b" else value.dtype
        fitting = [n for n, v in self.values.items()
                   if n != name and v.dtype == dtype and _broadcasts(v.shape, value.shape)
                   and not _is_position(n, self.inputs)]  # fmt: skip
        if fitting and choose.random() < 0.6:
            return choose.choice(fitting)
        if dtype in (torch.float16, torch.bfloat16):
            return choose.choice(fitting) if fitting else None
        return self._input(value.shape, dtype)

    def _input(
        self, shape: Sequence[int], dtype: torch.dtype, least: int = 0, size: int = 0
    ) -> str | None:
        if len(self.inputs) >= _MOST_INPUTS:
            return None
        return self._new_input(shape, dtype, least, size)


def _fields(template: str) -> list[str]:
    return list(dict.fromkeys(field for _, field, _, _ in Formatter().parse(template) if field))


def _is_position(name: str, inputs: Sequence[Input]) -> bool:
    return any(x.name == name and x.size for x in inputs)


def _broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    try:
        return torch.broadcast_shapes(tuple(shape), tuple(to)) == tuple(to)
    except RuntimeError:
        return False


def _kind(value: Tensor) -> str:
    if value.dtype == torch.bool:
        return "b"
    if value.dtype in (torch.float16, torch.bfloat16):
        return "h"
    return "f" if value.is_floating_point() else "i"
