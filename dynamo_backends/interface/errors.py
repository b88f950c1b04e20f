"""Defines exception classes under `DynamoBackendsError`, and helpers to handle errors.

Every message says what was given, what is valid, and what to do about it.
"""

import contextlib
import difflib
import logging
import os
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from dynamo_backends import _torch_private as private
from dynamo_backends.interface.report import GraphReport


class DynamoBackendsError(Exception):
    """Base class of every error that this package raises on purpose."""


class UnknownBackendError(DynamoBackendsError):
    """No backend is registered under the given name."""


class BackendUnavailableError(DynamoBackendsError):
    """The backend exists but cannot run here: a package or a device is missing."""


class OptionError(DynamoBackendsError):
    """An option is unknown, of the wrong type, or has a value that is not allowed."""


class DeviceError(DynamoBackendsError):
    """A device was asked for that is absent, or tensors live on different devices."""


class RankError(DynamoBackendsError):
    """Another rank of a multi-process step has ended, hangs, or runs other code.

    The steps of this process cannot go on; what lives on the mesh is lost.

    Attributes:
        rank: Rank of the process that is to blame; None: it is not known.
    """

    def __init__(self, message: str, rank: int | None = None):
        super().__init__(message)
        self.rank = rank


class LoweringError(DynamoBackendsError):
    """One operator could not be lowered.

    Attributes:
        node_name: Name of the FX node, so that the pipeline can keep that node in eager.
        reason: Why, in words for the user.
    """

    def __init__(self, node_name: str, op: str, reason: str):
        super().__init__(f"{op} (node {node_name!r}) cannot be lowered: {reason}")
        self.node_name = node_name
        self.op = op
        self.reason = reason


class CompileError(DynamoBackendsError):
    """A graph could not be compiled although each of its operators is supported."""


class NotPaddedError(DynamoBackendsError):
    """A graph cannot be compiled for inputs padded to larger sizes.

    Attributes:
        reason: Why, in words for the user.
    """

    def __init__(self, op: str, reason: str):
        super().__init__(f"{op}: {reason}")
        self.op = op
        self.reason = reason


class TrialNeededError(DynamoBackendsError):
    """Operator support needs a trial compilation, which this thread must not run."""


class SaveError(DynamoBackendsError):
    """A compiled graph cannot be saved, or its file has an incompatible version."""


class PackageError(DynamoBackendsError):
    """A package is damaged, cannot be used on this machine, or is called with other inputs."""


class FallbackRefusedError(DynamoBackendsError):
    """Something would have run in eager, and the option `fallback="error"` forbids that."""


class VerificationError(DynamoBackendsError):
    """Compiled code's results differ from eager's, and `fallback="error"` forbids eager."""


class StepCaptureError(DynamoBackendsError):
    """A training step cannot be captured, or run, as one graph (see `compile_step`)."""


class StepOperatorError(StepCaptureError):
    """A backend cannot compile a training step as one graph, but maybe in parts."""


class StepDeviceError(StepCaptureError, DeviceError):
    """A training step uses tensors on a device for which steps are not compiled."""


class DoubleBackwardError(DynamoBackendsError, RuntimeError):
    """Second-order gradients were requested of a compiled graph."""


class NormalFormError(DynamoBackendsError):
    """A graph violates an invariant of normal form (see `dynamo_backends.graph.check`)."""


class DecisionError(DynamoBackendsError):
    """An autotune decision does not exist, or a decision file is invalid."""


class ModelError(DynamoBackendsError):
    """The command line cannot construct the model that the user named."""


class ForkedProcessError(DynamoBackendsError):
    """A forked child uses a vendor runtime that its parent started."""


@contextlib.contextmanager
def reraise_as_compile_error(
    said: str, plain: Callable[[BaseException], str] = str
) -> Iterator[None]:
    """Converts other exceptions in the block to `CompileError` (context manager).

    Args:
        said: What cannot be done, the beginning of its text.
        plain: What it says of the other error.
    """
    try:
        yield
    except DynamoBackendsError:
        raise
    except Exception as error:
        raise CompileError(f"{said}: {plain(error)}") from error


@contextlib.contextmanager
def reraise_as_model_error(said: str, file: str = "") -> Iterator[None]:
    """Converts exceptions of user code to `ModelError` with its line (context manager).

    Args:
        said: What cannot be done, the beginning of its text.
        file: Whose line is meant; empty: the innermost that is in no package.
    """
    try:
        yield
    except Exception as error:
        inner = getattr(error, "inner_exception", None) or error
        if isinstance(inner, DynamoBackendsError):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [f for f in frames if (f.filename == file if file else _is_of_user(f.filename))]
        where = f" ({theirs[-1].filename}:{theirs[-1].lineno}, {theirs[-1].line})" if theirs else ""
        raise ModelError(f"{said}: {brief_error(error)}{where}") from error


def _is_of_user(file: str) -> bool:
    return "site-packages" not in file and not file.startswith(("<", _PACKAGE, _STANDARD_LIBRARY))


_PACKAGE = str(Path(__file__).parents[1])
_STANDARD_LIBRARY = str(Path(contextlib.__file__).parent)


def did_you_mean(name: str, known: Iterable[str], most: int = 1) -> str:
    """Returns " Did you mean ...?" with the closest known names; empty if none is close."""
    near = difflib.get_close_matches(name, list(known), most)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def brief_error(error: BaseException) -> str:
    """Formats an exception as "Class: message" in one line, unwrapping Dynamo's error."""
    inner = getattr(error, "inner_exception", None) or error
    notes = "".join(f", {note}" for note in getattr(inner, "__notes__", ()))
    return f"{type(inner).__name__}: {' '.join(_lines(inner)[:2])}{notes}"


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message; its class name if empty."""
    return error_lines(error)[0][:200]


def error_lines(error: BaseException) -> list[str]:
    """Returns the non-empty lines of an exception's message; its class name if none."""
    return _lines(error) or [type(error).__name__]


def _lines(error: BaseException) -> list[str]:
    return [line.strip() for line in error_text(error).splitlines() if line.strip()]


def error_text(error: BaseException) -> str:
    """Returns an exception's message with the values of printed tensors elided.

    `KeyError(parameter)`, for one, is all of the parameter's values.
    """
    text = str(error)
    start = text.find(_TENSOR)
    while start >= 0:
        first = start + len(_TENSOR)
        end, depth = first, 1
        while end < len(text) and depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        text = f"{text[:first]}...){text[end:]}"
        start = text.find(_TENSOR, first)
    return text


_TENSOR = "tensor("


log = logging.getLogger("dynamo_backends")

_OURS = (LoweringError, CompileError, ForkedProcessError)  # what a vendor cannot do, or we


def checks_enabled() -> bool:
    """Returns whether `DYNAMO_BACKENDS_CHECK` enables debug checks after every pass.

    Graphs are checked after every pass then, and unforeseen errors are raised.
    """
    return os.environ.get("DYNAMO_BACKENDS_CHECK", "0") not in ("", "0")


def must_propagate(error: BaseException) -> bool:
    """Returns whether an error must reach the user or Dynamo instead of eager fallback."""
    if isinstance(error, private.dynamo_control_exceptions()) or checks_enabled():
        return True
    return isinstance(error, DynamoBackendsError) and not isinstance(error, _OURS)


@contextlib.contextmanager
def suppress_and_log(report: GraphReport | None, stage: str) -> Iterator[None]:
    """Logs and suppresses errors of an optional stage (context manager).

    Args:
        report: Gets the reason; None: only a log line says it.
        stage: What is done in the block, the subject of a sentence.
    """
    try:
        yield
    except Exception as error:
        if must_propagate(error):
            raise
        log.debug("%s failed", stage, exc_info=True)
        text = f"{stage} failed ({brief_error(error)})"
        if report is None:
            log.warning("%s", text)
        else:
            report.note_failure(text)
