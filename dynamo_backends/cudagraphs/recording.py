"""One recorded graph, with the memory it reads and writes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dynamo_backends.cudagraphs.device import Order, driver
from dynamo_backends.cudagraphs.slots import Results, Slots
from dynamo_backends.interface.errors import CompileError

Function = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True)
class RecordedInputs:
    """How the inputs of a function reach its graph.

    Attributes:
        baked: Positions of those that the graph reads at their own addresses.
        written: Positions of those that the function writes to.
        reuse: Whether results are handed out in the graph's own memory.
    """

    baked: frozenset[int]
    written: frozenset[int] = frozenset()
    reuse: bool = False


class Recording:
    """What a function has launched, for one set of addresses.

    Args:
        function: What to record. It has been called before, on the side stream.
        inputs: Of the call that is due; it is not run yet.
        wiring: How inputs reach the graph.
        order: Of the device. Its lock is held.

    Raises:
        CompileError: An input or output is not on the device, or overlaps itself.
        RuntimeError: Something was launched that cannot be recorded.
    """

    def __init__(
        self, function: Function, inputs: Sequence[Any], wiring: RecordedInputs, order: Order
    ):
        self._order = order
        self._wiring = wiring
        _check_devices(inputs, order.index, "an input")
        tensors = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]
        self._baked = [i for i in tensors if i in wiring.baked]
        self._copied = [i for i in tensors if i not in wiring.baked]
        self._others = [(i, x) for i, x in enumerate(inputs) if not isinstance(x, Tensor)]
        self._addresses = self._read_addresses(inputs)
        self._slots = _slots([inputs[i] for i in self._copied])
        self._write_back = [k for k, i in enumerate(self._copied) if i in wiring.written]
        self._written = [i for i in tensors if i in wiring.written]
        self._graph, self._outputs = self._record(function, inputs)
        _check_devices(self._outputs, order.index, "an output")
        self._results = None if wiring.reuse else _results(self._outputs)

    def moved(self, inputs: Sequence[Any]) -> set[int]:
        """Positions of the baked inputs that are elsewhere than when they were recorded."""
        return {i for i, a in zip(self._baked, self._addresses, strict=True)
                if inputs[i].data_ptr() != a}  # fmt: skip

    def is_for(self, inputs: Sequence[Any]) -> bool:
        """Whether inputs are where the graph reads them, and its other values are the same."""
        return self._read_addresses(inputs) == self._addresses and all(
            inputs[i] == value for i, value in self._others
        )

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """Launches the graph on such inputs."""
        given = [inputs[i] for i in self._copied]
        with self._order.lock:
            self._order.enter()
            self._slots.fill(given)
            self._graph.replay()
            self._slots.write_back(self._write_back, given)
            if self._written:  # torch has not seen that anything wrote to them
                torch.autograd.graph.increment_version([inputs[i] for i in self._written])
            if self._results is not None:
                return self._results.copy()
        return [x.detach() if isinstance(x, Tensor) else x for x in self._outputs]

    def _read_addresses(self, inputs: Sequence[Any]) -> list[int]:
        return [inputs[i].data_ptr() for i in self._baked]

    def _record(self, function: Function, inputs: Sequence[Any]) -> tuple[Any, list[Any]]:
        cuda, order = driver(), self._order
        given = list(inputs)
        for i, slot in zip(self._copied, self._slots.tensors, strict=True):
            given[i] = slot
        graph = cuda.new_graph()
        # Memory that an earlier graph of the pool has given back may become results of this one,
        # and is overwritten when the earlier one runs again.
        pool = cuda.new_pool() if self._wiring.reuse else order.pool
        order.enter()
        try:
            with cuda.capture(graph, pool, cuda.side_stream(order.index)):
                outputs = list(function(given))
        except BaseException:
            order.renew_pool()
            raise
        return graph, outputs


def _slots(inputs: Sequence[Tensor]) -> Slots:
    try:
        return Slots(inputs)
    except ValueError as error:
        raise CompileError(f"an input cannot be copied to static memory: {error}") from error


def _results(outputs: Sequence[Any]) -> Results:
    try:
        return Results(outputs)
    except ValueError as error:
        raise CompileError(f"an output cannot be copied: {error}") from error


def _check_devices(values: Sequence[Any], index: int, what: str) -> None:
    wanted = torch.device(driver().kind, index)
    for value in values:
        if not isinstance(value, Tensor) or _same_device(value.device, wanted):
            continue
        raise CompileError(
            f"{what} is on {value.device} and not on {wanted}; a graph would keep the value that "
            "it has while it is recorded"
        )


def _same_device(device: torch.device, wanted: torch.device) -> bool:
    return device.type == wanted.type and (device.index or 0) == (wanted.index or 0)
