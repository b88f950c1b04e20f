"""Starts the processes of a job, as torchrun does, and ends them in time."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT = 300.0  # seconds for a job


class Job:
    """Processes that torch.distributed sees as one job; rank 0's holds the store.

    Args:
        code: What each runs.
        folder: Where it runs; outputs are kept there.
        size: How many there are.
        arguments: Of each.
    """

    def __init__(self, code: str, folder: Path, size: int = 2, arguments: tuple[str, ...] = ()):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._end = time.monotonic() + LIMIT
        self._outputs = [folder / f"rank{rank}.txt" for rank in range(size)]
        self.processes = []
        for rank, output in enumerate(self._outputs):
            variables = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
                "DYNAMO_BACKENDS_CACHE": str(folder / "cache"),
            }
            with output.open("w", encoding="utf-8") as file:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-u", "-c", code, *arguments],
                        cwd=folder,
                        env=variables,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )

    def output(self, rank: int) -> str:
        """What a rank has written."""
        return self._outputs[rank].read_text(encoding="utf-8")

    def wait_for(self, rank: int, text: str) -> None:
        """Until a rank has written something."""
        while text not in self.output(rank):
            assert self.processes[rank].poll() is None, self.output(rank)
            assert time.monotonic() < self._end, self.output(rank)
            time.sleep(0.05)

    def wait(self, rank: int) -> int:
        """Until a rank ends; its exit status."""
        left = max(0.0, self._end - time.monotonic())
        try:
            return self.processes[rank].wait(left)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"rank {rank} hangs: {self.output(rank)}") from None

    def finish(self) -> list[str]:
        """Until all have ended well; what they have written."""
        for rank in range(len(self.processes)):
            assert self.wait(rank) == 0, "\n".join(map(self.output, range(len(self.processes))))
        return list(map(self.output, range(len(self.processes))))

    def close(self) -> None:
        """Ends what is left."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def job(code: str, folder: Path, size: int = 2, arguments: tuple[str, ...] = ()) -> Iterator[Job]:
    """A `Job` that has ended afterwards."""
    started = Job(code, folder, size, arguments)
    try:
        yield started
    finally:
        started.close()
