"""What a thread calls compiled blocks for: results, a recording of activations, or a proof."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


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
    """Of the calling thread.

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
    """Inside: blocks that are to be quantized run in eager and keep their activations."""
    before, STATE.recording = STATE.recording, Recording()
    try:
        yield
    finally:
        STATE.recording = before


@contextmanager
def proving(in_float: float = 0.0) -> Iterator[Proof]:
    """Inside: blocks are quantized, and used by this thread alone until the proof has passed.

    Args:
        in_float: See `Proof`.
    """
    before, STATE.proof = STATE.proof, Proof(in_float)
    try:
        yield STATE.proof
    finally:
        STATE.proof = before
