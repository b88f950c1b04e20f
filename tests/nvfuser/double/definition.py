"""A definition's inputs, outputs and execution."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.nvfuser.double.types import FLOATS, HALVES, INTEGERS, DataType, InputInfo, Val, check


class Definition:
    """A fusion while it is defined, and afterwards."""

    def __init__(self) -> None:
        self.inputs: list[Val] = []
        self.outputs: list[Val] = []
        self.records = 0
        self.is_open = False
        self.is_closed = False

    def open(self) -> None:
        check(not self.is_open and not self.is_closed, "a definition is made only once")
        self.is_open = True

    def close(self) -> None:
        check(self.is_open, "the definition is not open")
        self.is_open, self.is_closed = False, True

    def record(self) -> None:
        """Notes that something was added."""
        check(not self.is_closed, "Attempting to add to a completed definition!")
        check(self.is_open, "the definition is not open")
        self.records += 1

    def kind(self, dtype: Any) -> str:
        """The name of a member of `DataType`."""
        check(isinstance(dtype, DataType), f"{dtype!r} is no DataType")
        name: str = dtype.value
        return name

    def define_tensor(
        self,
        shape: Sequence[int],
        contiguity: Sequence[bool | None],
        dtype: Any = None,
        is_cpu: bool = False,
        stride_order: Sequence[int] = (),
    ) -> Val:
        """An input: 1 in `shape` is broadcast, -1 any other size.

        `contiguity` is in the order of dimensions in memory; None is for broadcast dimensions.
        """
        self.record()
        check(all(type(n) is int and n in (-1, 1) for n in shape), f"wrong shape {shape}")
        check(all(f is None or type(f) is bool for f in contiguity), f"wrong flags {contiguity}")
        rank = len(shape)
        check(sorted(stride_order) == list(range(rank)), f"wrong order of strides {stride_order}")
        check(len(contiguity) == rank, f"{len(contiguity)} flags for {rank} dimensions")
        check(not is_cpu, "a fusion runs on the device")
        flags = [contiguity[rank - 1 - stride_order[d]] for d in range(rank)]
        for d in range(rank):
            check(shape[d] != 1 or flags[d] is None, f"dimension {d} is broadcast")
        info = InputInfo(tuple(shape), tuple(contiguity), tuple(stride_order))
        broadcast = tuple(n == 1 for n in shape)
        self.inputs.append(Val(self, self.kind(dtype), broadcast, input=info))
        return self.inputs[-1]

    def define_scalar(self, value: bool | int | float, dtype: Any = None) -> Val:
        """A constant, of a type that holds it."""
        self.record()
        kind = self.kind(dtype)
        fits = {
            bool: kind == "Bool",
            int: kind in INTEGERS,
            float: kind in FLOATS,
        }
        check(fits.get(type(value), False), f"{value!r} is no constant of type {kind}")
        if kind == "Int32":
            check(-(2**31) <= value < 2**31, f"{value} is no 32 bit integer")
        return Val(self, kind, None, lambda: value)

    def add_output(self, output: Val) -> None:
        """Makes a tensor a result."""
        self.record()
        check(isinstance(output, Val) and output.owner is self, "an output of another definition")
        check(output.is_tensor, "an output is a tensor")
        check(output.input is None, "an input is returned as an output")
        check(output not in self.outputs, "an output is added twice")
        self.outputs.append(output)

    def run(self, inputs: Sequence[Any]) -> list[Tensor]:
        """Computes the results; what is only moved is returned as a view, as nvFuser does."""
        check(self.is_closed, "the definition is not closed")
        check(self.outputs, "the fusion has no outputs")
        check(len(inputs) == len(self.inputs), f"{len(inputs)} inputs for {len(self.inputs)}")
        check(all(isinstance(t, Tensor) for t in inputs), "an input is no tensor")
        check(len({t.device for t in inputs}) <= 1, "inputs are on several devices")
        known: dict[Val, Any] = {}
        for val, tensor in zip(self.inputs, inputs, strict=True):
            assert val.input is not None
            val.input.check(tensor, val.dtype)
            known[val] = tensor
        with torch.no_grad():
            return [self._value(val, known) for val in self.outputs]

    def _value(self, val: Val, known: dict[Val, Any]) -> Any:
        pending = [val]
        while pending:
            top = pending[-1]
            missing = [s for s in top.sources if s not in known]
            if missing:
                pending += missing
                continue
            pending.pop()
            if top not in known:
                assert top.evaluate is not None
                known[top] = top.evaluate(*(known[s] for s in top.sources))
        return known[val]


__all__ = ["HALVES", "Definition"]
