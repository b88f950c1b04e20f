"""Refuses the use of vendors' runtimes in forked children, where their threads are missing."""

import os

from dynamo_backends.interface.errors import ForkedProcessError


def check_process(pid: int, vendor: str) -> None:
    """Raises `ForkedProcessError` in another process than `pid`, where a vendor was started."""
    if os.getpid() != pid:
        raise ForkedProcessError(
            f"{vendor} was started before os.fork(), and its threads do not survive a fork. "
            "Compile in the child, or start processes with 'spawn'."
        )
