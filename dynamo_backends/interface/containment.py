"""Where failures end, so that none of ours, or of a vendor, reaches a user's compiled call.

| what fails | what runs in eager | where the reason is |
|---|---|---|
| `Backend.supports`, a trial | the call | `GraphReport.fallbacks` |
| `Backend.plan` | all calls in question | `GraphReport.fallbacks` |
| `Backend.compile` | the block | `GraphReport.fallbacks` |
| a compiled block when it is called | the block | `GraphReport.events` |
| normal form, passes, partition, programs | the functional graph | `GraphReport.reverted` |
| availability, graphs taken whole, AOT Autograd | the captured graph | `GraphReport.reverted` |
| the disk cache, a report | nothing | `GraphReport.failures` |

What the user has to act on (an option, a device, a missing package) is raised, and so is everything
with `fallback="error"`, as `FallbackRefusedError`. Errors that steer Dynamo pass. With
`DYNAMO_BACKENDS_CHECK=1` nothing that is unforeseen is contained: tests are to see it.

Running out of memory (`MemoryError`) while compiling is contained, because that memory was the
compiler's; a compiled call raises it, because eager needs as much.
"""

import contextlib
import logging
import os
from collections.abc import Iterator

from dynamo_backends import _torch_private as private
from dynamo_backends.interface.errors import (
    CompileError,
    DynamoBackendsError,
    ForkedProcessError,
    LoweringError,
    brief_error,
)
from dynamo_backends.interface.report import GraphReport

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
    """What fails inside the block is left out, and noted: results do not depend on it.

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
