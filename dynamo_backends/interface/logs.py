"""Silences the loggers of libraries, and what compiled code writes to stderr."""

import contextlib
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterator

from dynamo_backends._torch_private.forks import fork_safe_rlock


@contextlib.contextmanager
def silence_loggers(*names: str) -> Iterator[None]:
    """Suppresses messages below CRITICAL of named loggers (context manager)."""
    loggers = [logging.getLogger(name) for name in names]
    # Children without a level of their own have their parent's. Setting one takes a while: it makes
    # all loggers of the process forget what they are enabled for.
    loggers += [
        logger
        for known, logger in list(logging.root.manager.loggerDict.items())
        if isinstance(logger, logging.Logger)
        and logger.level
        and any(known.startswith(f"{name}.") for name in names)
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


_stderr = fork_safe_rlock()
_STDERR = 2


@contextlib.contextmanager
def filter_stderr(pattern: re.Pattern[bytes]) -> Iterator[None]:
    """Drops stderr lines that match a pattern, native code's too (context manager).

    For libraries whose compiled code writes warnings there and has no switch for it. One block
    runs at a time.
    """
    with _stderr, tempfile.TemporaryFile() as kept, contextlib.ExitStack() as stack:
        try:
            original = os.dup(_STDERR)
        except OSError:  # the process has no stderr
            yield
            return
        stack.callback(os.close, original)
        sys.stderr.flush()
        os.dup2(kept.fileno(), _STDERR)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(original, _STDERR)
            kept.seek(0)
            lines = [line for line in kept.readlines() if not pattern.search(line)]
            os.write(original, b"".join(lines))
