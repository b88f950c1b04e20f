"""One exception class per kind of failure, all under `DynamoBackendsError`, and where failures end.

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
    """Another process of a step on a mesh has ended, is suspended, or does something else.

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
    """The vendor's compiler refused a graph whose operators were all lowered."""


class NotPaddedError(DynamoBackendsError):
    """A graph cannot be compiled for padded inputs.

    Attributes:
        reason: Why, in words for the user.
    """

    def __init__(self, op: str, reason: str):
        super().__init__(f"{op}: {reason}")
        self.op = op
        self.reason = reason


class TrialNeededError(DynamoBackendsError):
    """A call has to be tried before it is decided on, and this thread is to make no trials."""


class SaveError(DynamoBackendsError):
    """A compiled graph cannot be saved to a file, or loaded from one of another version."""


class PackageError(DynamoBackendsError):
    """A package is damaged, cannot be used on this machine, or is called with other inputs."""


class FallbackRefusedError(DynamoBackendsError):
    """Something would have run in eager, and the option `fallback="error"` forbids that."""


class VerificationError(DynamoBackendsError):
    """Compiled code's results differ from eager's, and `fallback="error"` forbids eager."""


class StepCaptureError(DynamoBackendsError):
    """A training step cannot be captured, or run, as one graph (see `compile_step`)."""


class StepOperatorError(StepCaptureError):
    """A backend cannot compile the whole graph of a training step, but maybe parts of it."""


class StepDeviceError(StepCaptureError, DeviceError):
    """A training step has tensors on a device for which no whole steps are compiled."""


class DoubleBackwardError(DynamoBackendsError, RuntimeError):
    """Gradients of gradients were asked of a compiled graph."""


class NormalFormError(DynamoBackendsError):
    """A graph lacks a property that it should have (see `dynamo_backends.graph.check`)."""


class DecisionError(DynamoBackendsError):
    """A decision of autotune does not exist, or a file does not contain decisions."""


class ModelError(DynamoBackendsError):
    """The command line cannot build the model that it was given."""


class ForkedProcessError(DynamoBackendsError):
    """A forked child uses a runtime that was started before the fork."""


@contextlib.contextmanager
def as_compile_error(said: str, plain: Callable[[BaseException], str] = str) -> Iterator[None]:
    """Raises a `CompileError` for any other error inside the block.

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
def as_model_error(said: str, file: str = "") -> Iterator[None]:
    """Raises a `ModelError`, with the line, for errors that the user's code raises in the block.

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
    """Returns a question that names the nearest known name; empty if none is near."""
    near = difflib.get_close_matches(name, list(known), most)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def brief_error(error: BaseException) -> str:
    """Returns an exception in one line; for Dynamo's "backend failed", what the backend raised."""
    inner = getattr(error, "inner_exception", None) or error
    notes = "".join(f", {note}" for note in getattr(inner, "__notes__", ()))
    return f"{type(inner).__name__}: {' '.join(_lines(inner)[:2])}{notes}"


def first_line(error: BaseException) -> str:
    """Returns the first line of what an exception says; its class if it says nothing."""
    return lines_of(error)[0][:200]


def lines_of(error: BaseException) -> list[str]:
    """Returns what an exception says, without empty lines; its class if that is nothing."""
    return _lines(error) or [type(error).__name__]


def _lines(error: BaseException) -> list[str]:
    return [line.strip() for line in text_of(error).splitlines() if line.strip()]


def text_of(error: BaseException) -> str:
    """Returns what an exception says, without the contents of tensors in it.

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
    """Returns whether the package watches itself: `DYNAMO_BACKENDS_CHECK` is set and not 0.

    Graphs are checked after every pass then, and unforeseen errors are raised.
    """
    return os.environ.get("DYNAMO_BACKENDS_CHECK", "0") not in ("", "0")


def is_for_others(error: BaseException) -> bool:
    """Returns whether an error is meant for the user or for Dynamo, or for tests to see."""
    if isinstance(error, private.dynamo_control_flow()) or checks_enabled():
        return True
    return isinstance(error, DynamoBackendsError) and not isinstance(error, _OURS)


@contextlib.contextmanager
def done_without(report: GraphReport | None, stage: str) -> Iterator[None]:
    """Logs errors of the block and goes on, where results do not depend on it.

    Args:
        report: Gets the reason; None: only a log line says it.
        stage: What is done in the block, the subject of a sentence.
    """
    try:
        yield
    except Exception as error:
        if is_for_others(error):
            raise
        log.debug("%s failed", stage, exc_info=True)
        text = f"{stage} failed ({brief_error(error)})"
        if report is None:
            log.warning("%s", text)
        else:
            report.note_failure(text)
