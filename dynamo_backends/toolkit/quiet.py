"""Keeps libraries' loggers quiet for a while."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def silenced(*names: str) -> Iterator[None]:
    """Nothing below CRITICAL comes from these loggers and their children inside the block."""
    loggers = [
        logging.getLogger(known)
        for known in (*names, *logging.root.manager.loggerDict)
        if any(known == name or known.startswith(f"{name}.") for name in names)
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
