"""Where schedules are measured: a process of its own, which is started again when it is lost."""

import contextlib
import json
import queue
import subprocess
import sys
import threading
from typing import Any

from dynamo_backends.tuning.children import environment, kill

START_S = 300
"""For the process's imports and a function's default schedule."""

_COMMAND = ("-m", "dynamo_backends.tvm.worker")


class Lost(Exception):
    """The process crashed or took too long; the message says which."""


class MeasuringProcess:
    """A process that answers requests (see `worker`).

    Example:
        >>> with MeasuringProcess() as process:
        ...     process.ask({"do": "open", ...}, 60)
        {'seconds': 0.001}
    """

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()

    def __enter__(self) -> "MeasuringProcess":
        """The process starts with the first request."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the process."""
        self._end()

    @property
    def running(self) -> bool:
        """Whether there is a process, and so an open function."""
        return self._child is not None

    def ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """An answer.

        Args:
            request: See `worker`.
            limit_s: Seconds after which the process is ended.

        Raises:
            Lost: There is none. The next request starts a new process, with no function open.
        """
        child = self._child or self._start()
        assert child.stdin is not None
        try:
            child.stdin.write(json.dumps(request) + "\n")
            child.stdin.flush()
            line = self._answers.get(timeout=limit_s)
        except queue.Empty:
            self._end()
            raise Lost(f"it took more than {limit_s:g} s") from None
        except OSError:
            line = ""
        except BaseException:  # Ctrl-C; the answer would be taken for that of the next request
            self._end()
            raise
        if not line:
            status = child.wait()
            self._end()
            raise Lost(f"its process ended with status {status}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _start(self) -> "subprocess.Popen[str]":
        child = subprocess.Popen(
            [sys.executable, *_COMMAND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment(),
            start_new_session=True,  # Ctrl-C is for this process alone
        )
        answers: queue.SimpleQueue[str] = queue.SimpleQueue()

        def read() -> None:
            assert child.stdout is not None
            with contextlib.suppress(ValueError):  # it was closed
                for line in child.stdout:
                    answers.put(line)
            answers.put("")

        threading.Thread(target=read, daemon=True).start()
        self._child, self._answers = child, answers
        return child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        kill(child)
        for pipe in (child.stdin, child.stdout):
            with contextlib.suppress(OSError, ValueError):
                if pipe is not None:
                    pipe.close()
