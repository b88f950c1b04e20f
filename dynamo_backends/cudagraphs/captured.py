"""Functions that are recorded as a CUDA graph at a first call, and launched afterwards."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dynamo_backends.cudagraphs.device import Order, driver, order_of
from dynamo_backends.cudagraphs.slots import OutputCopies, StaticInputs
from dynamo_backends.interface.errors import CompileError, first_line

Function = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True)
class RecordedInputs:
    """The way in which the inputs of a function reach its CUDA graph.

    Attributes:
        baked: Positions of those that the graph reads at their own addresses.
        written: Positions of those that the function writes to.
        reuse: Whether results are handed out in the graph's own memory.
    """

    baked: frozenset[int]
    written: frozenset[int] = frozenset()
    reuse: bool = False


class Recording:
    """The CUDA graph of a function for one set of addresses.

    Args:
        function: What to record. It has been called before, on the side stream.
        inputs: Inputs of the call that is due; it is not run yet.
        wiring: How inputs reach the graph.
        order: Order of the device. Its lock is held.

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
        """Returns whether inputs are where the graph reads them, and other values are unchanged."""
        return self._read_addresses(inputs) == self._addresses and all(
            inputs[i] == value for i, value in self._others
        )

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """Copies the inputs into the graph's static buffers, replays it, and returns outputs."""
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


def _slots(inputs: Sequence[Tensor]) -> StaticInputs:
    try:
        return StaticInputs(inputs)
    except ValueError as error:
        raise CompileError(f"an input cannot be copied to static memory: {error}") from error


def _results(outputs: Sequence[Any]) -> OutputCopies:
    try:
        return OutputCopies(outputs)
    except ValueError as error:
        raise CompileError(f"an output cannot be copied: {error}") from error


def _check_devices(values: Sequence[Any], index: int, what: str) -> None:
    wanted = torch.device(driver().kind, index)
    for value in values:
        if not isinstance(value, Tensor) or _same_device(value.device, wanted):
            continue
        raise CompileError(
            f"{what} is on {value.device} instead of {wanted}, so a CUDA graph would always use "
            "the value from recording time"
        )


def _same_device(device: torch.device, wanted: torch.device) -> bool:
    return device.type == wanted.type and (device.index or 0) == (wanted.index or 0)


MOVES = 3
"""Number of moves of baked inputs after which a function is recorded with none baked."""

RECORDINGS = 8
"""A function that would have to be recorded more often than this goes on as it is."""


class RecordingCallbacks(Protocol):
    """Callbacks for when a function is recorded as a CUDA graph, or refused."""

    def captured(self) -> None:
        """A graph was recorded."""

    def refused(self, reason: str) -> None:
        """Notes that a function cannot be recorded and runs without a CUDA graph; may raise."""


class GraphedFunction:
    """A function whose work on a CUDA device is recorded.

    The first calls run on a side stream, as libraries must have initialised themselves before they
    are recorded. Then one call is recorded, and all others launch the graph. Each call runs the
    function's work exactly once, so that random numbers and writes to inputs are those of eager.

    Args:
        function: From a list of inputs to its outputs. It launches its work on the current stream,
            takes its memory from torch, waits for nothing, and keeps nothing of a call.
        index: Index of the device.
        warmup: How many calls run before the one that is recorded.
        baked: Positions of inputs that usually stay where they are, such as parameters: the graph
            reads them there. If one has moved, the function is recorded again.
        hopeful: Positions of inputs that are baked if they did not move during the warm-up, such as
            saved tensors, among which parameters are. They are copied once they have moved.
        written: Positions of inputs that the function writes to.
        reuse: Whether results may be overwritten by the next call.
        notes: Is told what happens.
    """

    def __init__(
        self,
        function: Function,
        index: int,
        warmup: int,
        notes: RecordingCallbacks,
        *,
        baked: Collection[int] = (),
        hopeful: Collection[int] = (),
        written: Collection[int] = (),
        reuse: bool = False,
    ):
        self._function = function
        self._index = index
        self._left = warmup
        self._notes = notes
        self._hopeful = set(hopeful)
        self._seen: dict[int, int] = {}
        self._wiring = RecordedInputs(frozenset((*baked, *hopeful)), frozenset(written), reuse)
        self._recording: Recording | None = None
        self._moves = 0
        self._plain = False

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        """Runs the function on inputs of the same shapes, strides and dtypes each time."""
        recording = self._recording
        cuda = driver()
        if self._plain or cuda.is_capturing():
            return self._function(inputs)
        if recording is not None and recording.is_for(inputs):
            return recording.run(inputs)
        order = order_of(self._index)
        with order.lock:
            if self._left > 0:
                self._left -= 1
                return self._warm_up(order, inputs)
            return self._record(order, inputs)

    def _warm_up(self, order: Order, inputs: list[Any]) -> Sequence[Any]:
        self._look_for_moves(inputs)
        cuda = driver()
        current, side = order.enter(), cuda.side_stream(self._index)
        side.wait_stream(current)
        try:
            with cuda.use(side):
                results = self._function(inputs)
        finally:
            current.wait_stream(side)
        for result in results:
            if isinstance(result, Tensor) and result.device.type == cuda.kind:
                cuda.keep_for(result, current)
        return results

    def _record(self, order: Order, inputs: list[Any]) -> Sequence[Any]:
        if self._recording is not None:  # by another thread meanwhile, or for other addresses
            if self._recording.is_for(inputs):
                return self._recording.run(inputs)
            self._drop(self._recording.moved(inputs) & self._hopeful)
            self._recording = None
            self._moves += 1
            if self._moves == MOVES:
                self._drop(self._wiring.baked)
        else:
            self._look_for_moves(inputs)
        try:
            if self._moves == RECORDINGS:
                raise CompileError("the storage of a captured tensor changes at every call")
            self._recording = Recording(self._function, inputs, self._wiring, order)
        except Exception as error:
            self._refuse(error)
            return self._function(inputs)
        self._notes.captured()
        return self._recording.run(inputs)

    def _look_for_moves(self, inputs: Sequence[Any]) -> None:
        """Before anything is recorded: which hopeful inputs are not where they were."""
        for i in self._hopeful & self._wiring.baked:
            address = inputs[i].data_ptr() if isinstance(inputs[i], Tensor) else 0
            if self._seen.setdefault(i, address) != address:
                self._drop({i})

    def _drop(self, positions: Collection[int]) -> None:
        """Has inputs copied from now on."""
        self._wiring = dataclasses.replace(
            self._wiring, baked=self._wiring.baked.difference(positions)
        )

    def _refuse(self, error: Exception) -> None:
        self._notes.refused(first_line(error))
        self._plain = True
