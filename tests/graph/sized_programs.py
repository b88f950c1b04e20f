"""Random programs that run in eager for several sizes of their inputs, and depend on these."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from dynamo_backends.verify import widen_to_float64
from tests.graph.program_calls import draw_call
from tests.graph.programs import LAYOUTS, Call, Input, Program, Ref, make
from tests.graph.sized_calls import draw_sized_call

SHAPES: tuple[tuple[Any, ...], ...] = (
    ("n",), ("n", 3), (3, "n"), ("n", "m"), ("n", 1), (2, "n", 4), ("n", "m", 4), ("n", 4, "m"),
    ("n", 3, "m", "m"),
)  # fmt: skip
"""Of inputs; letters stand for sizes that change."""

DTYPES = (*[torch.float32] * 6, torch.float64, torch.int64, torch.bool)
FIRST = {"n": (6,), "m": (5, 6)}
OTHERS = (0, 1, 4, 11)
"""Sizes: none, one, below the first, and above it."""

FIXED = {"w1": (4, 4, 3), "w2": (2, 3, 3, 3)}
"""Filters of convolutions, which are inputs too."""

_STEPS = frozenset(
    {
        "floor", "sign", "eq", "lt", "ge", "ne", "remainder", "floor_divide", "fmod", "argmax",
        "any", "all", "logical_not", "logical_and", "isnan", "bitwise_xor", "index_select",
        "masked_fill", "torch.where", "argsort", "torch.sort", "topk", "to", "type_as",
        "torch.cummax",
    }
)  # fmt: skip
"""Calls that make a large difference of a small one."""

Env = dict[str, Any]
Sizes = Mapping[str, int]


@dataclass
class SizedProgram(Program):
    """A program, and the sizes that it is for.

    Attributes:
        sizes: What the letters in the shapes of inputs stand for, one call after the other.
    """

    sizes: list[Sizes] = field(default_factory=list)

    def inputs_of(self, sizes: Sizes) -> list[Tensor]:
        """The inputs of one call."""
        shapes = [tuple(sizes.get(str(n), n) for n in x.shape) for x in self.inputs]
        return [make(s, x.dtype, x.layout) for s, x in zip(shapes, self.inputs, strict=True)]


@st.composite
def sized_programs(draw: st.DrawFn, max_calls: int = 8) -> SizedProgram:
    """Programs that run in eager at all their sizes, and have finite results."""
    inputs = [
        Input(
            f"x{i}",
            draw(st.sampled_from(SHAPES)),
            draw(st.sampled_from(DTYPES)),
            draw(st.sampled_from(LAYOUTS)),
        )
        for i in range(draw(st.integers(1, 2)))
    ]
    inputs += [Input(name, shape) for name, shape in FIXED.items()]
    program = SizedProgram(inputs, [], [], _draw_sizes(draw))
    runs = [_Run(program, sizes) for sizes in program.sizes]
    for i in range(draw(st.integers(2, max_calls))):
        row = draw_sized_call if draw(st.integers(0, 2)) else _one_call
        for call in row(draw, runs[0].open, f"v{i}"):
            taken = [run.takes(call) for run in runs]
            if not all(ok for ok, run in zip(taken, runs, strict=True) if run.counts):
                break  # what eager refuses is no program
            runs = [run for ok, run in zip(taken, runs, strict=True) if ok]
            for run in runs:
                run.keep()
            program.calls.append(call)
    program.sizes = [run.sizes for run in runs]
    results = [name for name, value in runs[0].open.items() if isinstance(value, Tensor)]
    program.results = [Ref(name) for name in results[-4:]]
    return program


def _one_call(draw: st.DrawFn, env: Env, name: str) -> list[Call]:
    return [draw_call(draw, env, name)]


def _draw_sizes(draw: st.DrawFn) -> list[Sizes]:
    columns = {
        letter: [draw(st.sampled_from(first)), *draw(st.permutations(OTHERS))]
        for letter, first in FIRST.items()
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


class _Run:
    """A program at one of its sizes, as far as it has been drawn.

    Attributes:
        open: The values that calls may take.
        counts: A call that eager refuses is no call, rather than this no size.
    """

    def __init__(self, program: SizedProgram, sizes: Sizes):
        self.sizes = sizes
        self.counts = 0 not in sizes.values()
        given = program.inputs_of(sizes)
        names = [x.name for x in program.inputs]
        self._env: Env = dict(zip(names, given, strict=True))
        self._precise: Env = dict(zip(names, map(widen_to_float64, given), strict=True))
        self._next: tuple[str, Any, Any] = ("", None, None)

    @property
    def open(self) -> Env:
        return {n: v for n, v in self._env.items() if isinstance(v, Tensor) and n not in FIXED}

    def takes(self, call: Call) -> bool:
        """Whether eager takes a call, and its result can be compared."""
        if _is_left_out(call):
            return False
        sources = [a.name for a in call.args if isinstance(a, Ref)]
        if call.target in _STEPS and not all(map(self._is_exact, sources)):
            return False
        try:
            value = call.run(self._env)
            precise = call.run(self._precise)
        except Exception:  # of all kinds
            return False
        self._next = (call.name, value, precise)
        leaves = value if isinstance(value, list | tuple) else [value]
        return all(isinstance(x, Tensor) and _is_comparable(x) for x in leaves)

    def keep(self) -> None:
        """Makes the call a part of the program."""
        name, self._env[name], self._precise[name] = self._next[0], *self._next[1:]

    def _is_exact(self, name: str) -> bool:
        value = widen_to_float64(self._env[name])
        return torch.equal(value, self._precise[name].to(value.dtype))


def _is_left_out(call: Call) -> bool:
    """Whether a call draws, or writes to an input: see `random_graphs` for these."""
    words = ("rand", "dropout", "bernoulli", "setitem")
    return call.target.endswith("_") or any(word in call.target for word in words)


def _is_comparable(x: Tensor) -> bool:
    """Whether a value is finite, and wide enough for rounding not to show."""
    if x.dtype == torch.bfloat16:
        return False
    return not x.is_floating_point() or bool((x.abs() < 1e6).all())
