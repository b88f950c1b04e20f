"""One program of Inductor's for all sizes of a range.

Inductor gets symbols for the sizes. What it assumes of them while it compiles (that an index fits
into 32 bits, that two sizes differ) is looked at in each call; sizes of which it is not true get
programs of their own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.graph.sizes import SIZE_FUNCTIONS, Size, SizeReader, sizes_of, strides_of
from dynamo_backends.interface.errors import CompileError
from dynamo_backends.runtime.lru import LRU
from dynamo_backends.runtime.preparation import Run

Compile = Callable[[Sequence[Any]], Run]
"""Compiles for (fake) inputs."""

_MOST = 16  # programs for sizes of which an assumption does not hold


class RangedRun:
    """Runs the program for all sizes, or one that is made for those of a call.

    Args:
        places: Placeholders of the graph that is compiled, with the sizes of one call.
        compile_for: Compiles the graph.

    Raises:
        CompileError: See `symbols_of`.
    """

    def __init__(self, places: Sequence[fx.Node], compile_for: Compile):
        self._compile = compile_for
        symbols = symbols_of(places)
        self._read = SizeReader(places, list(symbols.values()))
        fresh = private.FreshSymbols({s: int(size) for s, size in symbols.items()})
        self._run = compile_for([_symbolic(p, fresh) for p in places])
        guards = sympy.And(*fresh.guards)
        self._holds = sympy.lambdify(list(symbols), guards, modules=[dict(SIZE_FUNCTIONS)])
        self._is_always = guards is sympy.true
        self._lock = fork_safe_lock()
        self._exact: LRU[tuple[int, ...], Run] = LRU(_MOST)

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        """Runs a program on inputs of any sizes that the symbols allow."""
        if self._is_always:
            return self._run(*inputs)
        sizes = self._read(inputs)
        run = self._run if self._holds(*sizes) else self._exact_for(tuple(sizes), inputs)
        return run(*inputs)

    def _exact_for(self, sizes: tuple[int, ...], inputs: Sequence[Any]) -> Run:
        with self._lock, private.disable_current_modes():
            run = self._exact.get(sizes)
            if run is None:
                mode = private.FakeTensorMode(allow_non_fake_inputs=True)
                run = self._compile([_fake_like(x, mode) for x in inputs])
                self._exact.put(sizes, run)
            return run


def symbols_of(places: Sequence[fx.Node]) -> dict[sympy.Symbol, Size]:
    """Returns the symbols of the inputs' sizes and strides, and their values in this call.

    Args:
        places: Placeholders of a graph for concrete shapes that came from symbolic ones.

    Raises:
        CompileError: Inductor cannot be given symbols for them: one stands for less than 2, or
            is not the size of any input by itself.
    """
    numbers = [number for place in places for number in _numbers(place)]
    sizes = [number for number in numbers if isinstance(number, Size)]
    found: dict[sympy.Symbol, Size] = {}
    for size in sizes:
        if isinstance(size.expression, sympy.Symbol):
            found.setdefault(size.expression, size)
    if any(size < 2 for size in found.values()):
        raise CompileError("Inductor's symbols stand for 2 and more")
    for size in sizes:
        if not size.expression.free_symbols <= found.keys():
            raise CompileError(f"Inductor has no symbol for the size {size.expression}")
    return found


def _numbers(place: fx.Node) -> list[int]:
    """Returns all that may vary of an input: itself, or the sizes and strides of its tensor."""
    value = place.meta["val"]
    numbers = (*sizes_of(place), *strides_of(place)) if isinstance(value, Tensor) else (value,)
    known = [number for number in numbers if isinstance(number, int)]
    if isinstance(value, Tensor) and len(known) != len(numbers):
        raise CompileError(f"the sizes of the input {place.name!r} are not known")
    return known


def _symbolic(place: fx.Node, fresh: private.FreshSymbols) -> Any:
    def symbolic(number: int) -> int | torch.SymInt:
        if isinstance(number, Size) and number.expression.free_symbols:
            return fresh.size(number.expression)
        return int(number)

    value = place.meta["val"]
    numbers = [symbolic(number) for number in _numbers(place)]
    if not isinstance(value, Tensor):
        return numbers[0] if numbers else value
    return fresh.tensor(tuple(numbers[: value.ndim]), tuple(numbers[value.ndim :]), value)


def _fake_like(value: Any, mode: private.FakeTensorMode) -> Any:
    return mode.from_tensor(value) if isinstance(value, Tensor) else value
