"""One program of Inductor's for all sizes of a range.

Inductor gets symbols for the sizes. What it assumes of them while it compiles (that an index fits
into 32 bits, that two sizes differ) is looked at in each call; sizes of which it is not true get
programs of their own.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import sympy
from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends.graph.sizes import SIZE_FUNCTIONS, Size, SizeReader, sizes_of, strides_of
from dynamo_backends.interface.errors import CompileError
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
        CompileError: There is a size that does not follow from other inputs' shapes.
    """

    def __init__(self, places: Sequence[fx.Node], compile_for: Compile):
        self._compile = compile_for
        symbols = _symbols(places)
        self._read = SizeReader(places, list(symbols.values()))
        fresh = private.FreshSymbols({s: int(size) for s, size in symbols.items()})
        self._run = compile_for([_symbolic(p, fresh) for p in places])
        guards = sympy.And(*fresh.guards)
        self._holds = sympy.lambdify(list(symbols), guards, modules=[dict(SIZE_FUNCTIONS)])
        self._is_always = guards is sympy.true
        self._lock = threading.Lock()
        self._exact: OrderedDict[tuple[int, ...], Run] = OrderedDict()

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        """Runs a program on inputs of any sizes that the symbols allow."""
        if self._is_always:
            return self._run(*inputs)
        sizes = self._read(inputs)
        run = self._run if self._holds(*sizes) else self._exact_for(tuple(sizes), inputs)
        return run(*inputs)

    def _exact_for(self, sizes: tuple[int, ...], inputs: Sequence[Any]) -> Run:
        with self._lock, private.disable_current_modes():
            run = self._exact.pop(sizes, None)
            if run is None:
                mode = private.FakeTensorMode(allow_non_fake_inputs=True)
                run = self._compile([_fake_like(x, mode) for x in inputs])
            self._exact[sizes] = run
            while len(self._exact) > _MOST:
                self._exact.popitem(last=False)
            return run


def _symbols(places: Sequence[fx.Node]) -> dict[sympy.Symbol, Size]:
    """Every symbol that can be read from the inputs, and its value in this call."""
    found: dict[sympy.Symbol, Size] = {}
    for place in places:
        for size in (place.meta["val"], *sizes_of(place), *strides_of(place)):
            if isinstance(size, Size) and isinstance(size.expression, sympy.Symbol):
                found.setdefault(size.expression, size)
    if any(size < 2 for size in found.values()):
        raise CompileError("Inductor's symbols stand for 2 and more")
    return found


def _symbolic(place: fx.Node, fresh: private.FreshSymbols) -> Any:
    def symbolic(number: Any) -> Any:
        if number is None:
            raise CompileError(f"the sizes of the input {place.name!r} are not known")
        is_open = isinstance(number, Size) and number.expression.free_symbols
        return fresh.size(number.expression, int(number)) if is_open else int(number)

    value = place.meta["val"]
    if not isinstance(value, Tensor):
        return symbolic(value) if isinstance(value, int) else value
    sizes, strides = map(symbolic, sizes_of(place)), map(symbolic, strides_of(place))
    return fresh.tensor(tuple(sizes), tuple(strides), value)


def _fake_like(value: Any, mode: private.FakeTensorMode) -> Any:
    return mode.from_tensor(value) if isinstance(value, Tensor) else value
