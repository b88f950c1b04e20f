"""Blocks that are quantized when their weights, and activations of batches, are known."""

import math
import threading
from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from dynamo_backends._torch_private import disable_current_modes
from dynamo_backends._torch_private.forks import fork_safe_rlock
from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface.errors import CompileError
from dynamo_backends.interface.executable import Bound, Executable
from dynamo_backends.runtime.prepared_executables import make_input_merger
from dynamo_backends.runtime.results import Results


class Recording:
    """One run over batches that calibrate; blocks forget what they saw in an earlier one."""


class Proof:
    """One comparison with eager on batches that were held out.

    Args:
        in_float: The part of a block's products, from its first one on, that stay in float32.

    Attributes:
        passed: Whether what was quantized for it may be used by all.
    """

    def __init__(self, in_float: float = 0.0) -> None:
        self.in_float = in_float
        self.passed = False


class ThreadState(threading.local):
    """The recording or calibration state of the calling thread.

    Attributes:
        recording: What it makes; None: it makes none.
        proof: What it makes; None: it makes none.
        met_unproven: Whether a block was called that has no proven program for its weights, and
            ran in eager.
    """

    recording: Recording | None = None
    proof: Proof | None = None
    met_unproven: bool = False


STATE = ThreadState()


@contextmanager
def recording() -> Iterator[None]:
    """Runs blocks in eager and records activations for calibration (context manager)."""
    before, STATE.recording = STATE.recording, Recording()
    try:
        yield
    finally:
        STATE.recording = before


@contextmanager
def quantizing_for_proof(in_float: float = 0.0) -> Iterator[Proof]:
    """Quantizes blocks for this thread until the proof passes (context manager).

    Args:
        in_float: See `Proof`.
    """
    before, STATE.proof = STATE.proof, Proof(in_float)
    try:
        yield STATE.proof
    finally:
        STATE.proof = before


def left_in_float(part: float, products: int) -> int:
    """Returns how many of a block's matrix products stay in float32.

    Args:
        part: See `QuantizedExecutable.prepare`.
        products: How many there are.
    """
    return min(math.ceil(part * products), max(products - 1, 0))


Activations = Sequence[Sequence[Tensor]]
"""Of several calls of a block, one list of tensors each."""


class QuantizedExecutable(Executable):
    """A block in int8.

    Whoever calls it first records activations, then proves what `prepare` made of them (see
    `ProvenGraph`). Before that, and when weights have changed and nothing has been proven for the
    new ones, the block runs in eager.

    Args:
        graph: With static shapes.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self._lock = fork_safe_rlock()
        self._recording: Recording | None = None
        self._seen: list[list[Tensor]] = []
        self._merge = make_input_merger(graph)
        self._results = Results(graph)

    @abstractmethod
    def prepare(self, weights: Sequence[Tensor], seen: Activations, in_float: float) -> Bound:
        """Quantizes the block for these weights.

        Args:
            weights: As for `bind`.
            seen: Activations of the batches that calibrate.
            in_float: The part of its products, from the first one on, that stay in float32; 0
                unless scales of activations come from batches.

        Raises:
            CompileError: The vendor's quantizer, or its compiler, refuses.
        """

    def bind(self, weights: Sequence[Tensor]) -> tuple[Bound, Collection[int]]:
        """See `Executable.bind`: nothing is quantized before a proof asks for it."""
        return _Quantized(self, [w.detach() for w in weights]), range(len(weights))

    def bind_live(self, weights: Sequence[Tensor]) -> tuple[Bound, Collection[int]]:
        """See `Executable.bind_live`: weights that keep changing are computed with in eager."""
        own = [w.detach() for w in weights]

        def run(activations: list[Tensor]) -> list[Tensor]:
            return self.eager(own, activations)

        return run, ()

    def eager(self, weights: Sequence[Tensor], activations: Sequence[Tensor]) -> list[Tensor]:
        """The block as it was captured; what goes in is kept where this thread records."""
        recording = STATE.recording
        if recording is not None:
            with self._lock:
                if self._recording is not recording:
                    self._recording, self._seen = recording, []
                self._seen.append([a.detach().clone() for a in activations])
        return self._results(self.graph.module(*self._merge(weights, activations)))

    def prepared(self, weights: Sequence[Tensor], in_float: float) -> tuple[Bound, Recording]:
        """Returns what `prepare` makes of what was recorded last."""
        with self._lock, disable_current_modes():
            if self._recording is None:
                raise CompileError("an int8 block was called before it was calibrated")
            return self.prepare(weights, self._seen, in_float), self._recording

    def is_recent(self, recording: Recording) -> bool:
        """Returns whether nothing was recorded after that."""
        return recording is self._recording


@dataclass(frozen=True)
class _Program:
    """The quantized program of a block, with its recording and proof."""

    bound: Bound
    recording: Recording
    proof: Proof


class _Quantized:
    """A block with one set of weights: in eager, until it is quantized and proven."""

    def __init__(self, executable: QuantizedExecutable, weights: Sequence[Tensor]):
        self._executable = executable
        self._weights = weights
        self._program: _Program | None = None  # read once a call: another thread may replace it

    def __call__(self, activations: list[Tensor]) -> list[Tensor]:
        program, proof = self._program, STATE.proof
        if program is not None and self._may_use(program, proof):
            return program.bound(activations)
        if proof is None:
            STATE.met_unproven = STATE.recording is None
            return self._executable.eager(self._weights, activations)
        bound, recording = self._executable.prepared(self._weights, proof.in_float)
        self._program = _Program(bound, recording, proof)
        return bound(activations)

    def _may_use(self, program: _Program, proof: Proof | None) -> bool:
        """Returns whether this thread, which may be making a proof, is to use what is quantized."""
        if STATE.recording is not None or not self._executable.is_recent(program.recording):
            return False
        if proof is not None and proof.in_float != program.proof.in_float:
            return False
        return program.proof.passed or program.proof is proof
