"""Functions that are recorded at one of their first calls and launched as a whole from then on."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from torch import Tensor

from dynamo_backends.cudagraphs.device import Order, driver, order_of
from dynamo_backends.cudagraphs.recording import Function, RecordedInputs, Recording
from dynamo_backends.interface.errors import CompileError, first_line

MOVES = 3
"""A function some of whose baked inputs have moved so often is recorded with none of them baked."""

RECORDINGS = 8
"""A function that would have to be recorded more often than this goes on as it is."""


class Notes(Protocol):
    """Who is told what became of a function."""

    def captured(self) -> None:
        """A graph was recorded."""

    def refused(self, reason: str) -> None:
        """It cannot be recorded and goes on as it is; may raise instead."""


class GraphedFunction:
    """A function whose work on a CUDA device is recorded.

    The first calls run on a side stream, as libraries must have initialised themselves before they
    are recorded. Then one call is recorded, and all others launch the graph. Each call runs the
    function's work exactly once, so that random numbers and writes to inputs are those of eager.

    Args:
        function: From a list of inputs to its outputs. It launches its work on the current stream,
            takes its memory from torch, waits for nothing, and keeps nothing of a call.
        index: Of the device.
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
        notes: Notes,
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
                raise CompileError("values that are part of the graph change all the time")
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
