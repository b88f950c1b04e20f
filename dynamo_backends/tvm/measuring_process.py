"""Where schedules are measured: a process of its own, which is started again when it is lost."""

from typing import ClassVar

from dynamo_backends.tuning.answering import AnsweringProcess

START_S = 300
"""For the process's imports and a function's default schedule."""


class MeasuringProcess(AnsweringProcess):
    """A process that answers requests (see `worker`); a new one has no function open."""

    command: ClassVar[tuple[str, ...]] = ("-m", "dynamo_backends.tvm.worker")
