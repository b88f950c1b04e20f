"""Replaces compiled code by eager after errors, wrong results or slowness.

What cannot be compiled, raises when it is called, or is wrong is replaced by its eager original and
stays replaced. One log line says so; what happens at run time is noted as an `EagerEvent`, too.
What is slower than eager is replaced likewise: that is no fault, and noted as a `PaceReport`.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Literal

from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends.interface.counters import total
from dynamo_backends.interface.errors import (
    FallbackRefusedError,
    RankError,
    StepCaptureError,
    VerificationError,
    brief_error,
    must_propagate,
)
from dynamo_backends.interface.report import EagerEvent, GraphReport, Region

log = logging.getLogger("dynamo_backends")


class EagerSwitch:
    """Decides, reports and counts that eager replaces compiled code.

    Args:
        eager: The original, which nothing has changed.
        reports: Of what was compiled; the first one names the backend.
        region: What the original is of.
        allowed: Whether eager may take over (`fallback="eager"`).
        failure: What failed, if that is more than compiled code: the beginning of a sentence.
        then: What is said of the time after; empty: eager runs it from now on.
        on_switch: Called when eager has taken over.
    """

    def __init__(
        self,
        eager: Callable[..., Any],
        reports: Sequence[GraphReport],
        region: Region,
        allowed: bool = True,
        failure: str = "",
        then: str = "",
        on_switch: Callable[[], None] = lambda: None,
    ):
        self.eager = eager
        self._reports = list(reports)
        self.region: Region = region
        self._allowed = allowed
        self._failure = failure
        self._then = then or f"the {region} runs in eager from now on"
        self._on_switch = on_switch
        self._lock = fork_safe_lock()
        self._is_switched = False

    def add_report(self, report: GraphReport) -> None:
        """Adds a further report that is told when eager takes over."""
        self._reports.append(report)

    def switch_uncompiled(self, error: Exception, stage: str) -> None:
        """Reports that a compilation failed and eager runs; raises if not allowed.

        Args:
            error: What was raised.
            stage: What failed, the subject of a sentence.

        Raises:
            Exception: The error itself, if it is not ours to contain (see `must_propagate`).
            FallbackRefusedError: Eager may not take over.
        """
        if must_propagate(error):
            raise error
        (report,) = self._reports
        log.debug("%s of %s failed", stage, report.backend, exc_info=error)
        reason = f"{stage} failed ({brief_error(error)})"
        self._check_allowed(f"{report.backend}: {reason}", error)
        total.add(uncompiled=1)
        report.reverted = f"{reason}; the {self.region} runs in eager instead"

    def run_eager_instead(self, error: Exception, *inputs: Any) -> Any:
        """Returns eager's results after compiled code raised; switches to eager.

        Raises:
            MemoryError: There was too little: eager needs as much, and the next call may find more.
            StepCaptureError: Inputs that were to be updated in place are lost.
            RankError: Another process has ended, and would be waited for in eager, too.
            FallbackRefusedError: Eager may not take over.
            Exception: What eager raises: the inputs are to blame, and nothing is replaced.
        """
        if isinstance(error, MemoryError | StepCaptureError | RankError):
            raise error
        reason = brief_error(error)
        self._check_allowed(self._said(reason), error)
        results = self.eager(*inputs)
        self.switch_after_error(reason, error)
        return results

    def switch_after_error(self, reason: str, error: Exception | None = None) -> None:
        """Switches to eager after compiled code raised; may raise FallbackRefusedError."""
        said = self._said(reason)
        self._check_allowed(said, error)
        self._switch("failed", said if self._failure else reason, said)

    def switch_after_mismatch(self, what: str, done: str = "") -> None:
        """Switches to eager after wrong results; raises VerificationError if forbidden.

        Args:
            what: How they differ, and where.
            done: The end of the text of the error.

        Raises:
            VerificationError: Eager may not take over.
        """
        report = self._reports[0]
        text = f"{report.backend} computed a wrong result in {report.title}: {what}"
        if not self._allowed:
            raise VerificationError(text + done)
        self._switch("wrong", text, text)

    def switch_if_slower(self, what: str, remedy: str, is_wanted: bool = True) -> bool:
        """Warns of slow code; returns whether eager replaces it.

        Args:
            what: What is slower, and by how much.
            remedy: What the user can do.
            is_wanted: Whether eager is to take over.

        Returns:
            Whether eager takes over.
        """
        takes_over = is_wanted and self._allowed
        with self._lock:
            if self._is_switched:
                return False
            self._is_switched = takes_over
        if takes_over:
            total.add(slower=1)
        log.warning(
            "%s; %s. %s",
            what,
            self._then if takes_over else "the compiled code stays in use",
            remedy,
        )
        return takes_over

    def _switch(self, kind: Literal["failed", "wrong"], reason: str, said: str) -> None:
        with self._lock:  # several threads may find the same
            if self._is_switched:
                return
            self._is_switched = True
        total.add(**{kind: 1})
        for report in self._reports:
            report.events.append(EagerEvent(kind, self.region, reason))
        log.warning("%s; %s", said, self._then)
        self._on_switch()

    def _said(self, reason: str) -> str:
        if self._failure:
            return f"{self._failure}: {reason}"
        return f"a compiled {self.region} of {self._reports[0].backend} failed ({reason})"

    def _check_allowed(self, said: str, error: Exception | None) -> None:
        if not self._allowed:
            text = f'{said}. With fallback="eager" it would run in eager.'
            raise FallbackRefusedError(text) from error
