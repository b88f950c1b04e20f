"""Raises an error where a forked child uses a runtime that its parent started."""

import os

from dynamo_backends.interface.errors import ForkedProcessError


def check_not_forked(pid: int, vendor: str) -> None:
    """Raises `ForkedProcessError` if this process is not `pid`."""
    if os.getpid() != pid:
        raise ForkedProcessError(
            f"{vendor} was started before os.fork(), and its threads do not survive a fork. "
            "Compile in the child, or start processes with 'spawn'."
        )
