"""The other side of `AnsweringProcess`: what a process that answers requests does."""

import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from dynamo_backends.tuning.stopped_time import follow

Say = Callable[[Any], None]
"""Tells the parent something before the answer; in types that JSON has."""


def answer_all(answer: Callable[[dict[str, Any], Say], dict[str, Any]]) -> None:
    """Answers one request after the other, JSON in a line each, as long as the parent is there.

    Args:
        answer: Makes the answer to a request.
    """
    follow(sys.argv)
    # What libraries print must not come between the answers.
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def write(line: dict[str, Any]) -> None:
        channel.write(json.dumps(line) + "\n")
        channel.flush()

    for line in _lines():
        write(answer(json.loads(line), lambda said: write({"said": said})))


def _lines() -> Iterable[str]:
    """Requests; where there are no more, the parent is gone, and so is this process at once."""
    given: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            given.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield given.get()
