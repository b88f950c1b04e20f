"""TensorRT's Python package: whether it is there, which version, and what it says."""

import functools
import importlib
import importlib.util
import logging
from typing import Any

log = logging.getLogger("dynamo_backends.tensorrt")

OLDEST = (10, 14)
NEWEST = 11
"""Versions whose Python interface the calls of this folder were checked against."""


def tensorrt() -> Any:
    """Returns the package `tensorrt`.

    Raises:
        ImportError: It is not there, or its libraries are not.
    """
    return importlib.import_module("tensorrt")


def why_unavailable() -> str | None:
    """Returns why the package `tensorrt` cannot be used; None if it can."""
    try:
        if importlib.util.find_spec("tensorrt") is None:
            return "tensorrt is not installed"
        version = tensorrt().__version__
    except Exception as error:  # its libraries are loaded by Python code of its own
        text = str(error).strip().splitlines()
        return f"tensorrt cannot be imported ({text[0] if text else type(error).__name__})"
    if not tensorrt_version() >= OLDEST or tensorrt_version()[0] > NEWEST:
        oldest = ".".join(map(str, OLDEST))
        return f"tensorrt {version} is not supported; install a version from {oldest} to {NEWEST}.x"
    return None


def tensorrt_version() -> tuple[int, int]:
    """Returns TensorRT's major and minor version."""
    major, minor, *_ = tensorrt().__version__.split(".")
    return int(major), int(minor)


@functools.cache
def _logger_of(package: Any) -> Any:
    levels = {
        package.ILogger.Severity.INTERNAL_ERROR: logging.ERROR,
        package.ILogger.Severity.ERROR: logging.ERROR,
        package.ILogger.Severity.WARNING: logging.INFO,
    }

    class Logger(package.ILogger):
        """Hands TensorRT's messages to Python's logging, and remembers the last error."""

        def __init__(self) -> None:
            package.ILogger.__init__(self)
            self.last_error = ""

        def log(self, severity: Any, msg: str) -> None:
            level = levels.get(severity, logging.DEBUG)
            if level == logging.ERROR:
                self.last_error = msg
                level = logging.INFO  # whoever made the call raises it
            log.log(level, "%s", msg)

    return Logger()


def logger() -> Any:
    """Returns the one logger that every object of TensorRT is given; it outlives all of them."""
    return _logger_of(tensorrt())


def last_error() -> str:
    """Returns what TensorRT said last when something failed, in one line."""
    text, logger().last_error = logger().last_error, ""
    lines = text.strip().splitlines()
    return lines[0][:300] if lines else "it gives no reason"
