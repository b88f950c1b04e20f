"""`BackendConformance`: the checks of a backend as tests."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

import pytest

from dynamo_backends.bench.backends import require_backend
from dynamo_backends.conformance import catalogue
from dynamo_backends.conformance.catalogue import CheckRunner, Settings
from dynamo_backends.conformance.outcomes import DTYPES, GROUPS, UNTRIED, Check, Group, Outcome
from dynamo_backends.conformance.workers import Worker
from dynamo_backends.interface.errors import OptionError

Run = Callable[[Check], Outcome]


class BackendConformance:
    """The checks of a backend, a test each; subclass it in a test file.

    Examples:
        >>> class TestMine(BackendConformance):
        ...     backend = "mine.plugin:mine"

    Each check runs in another process, which is kept for the next ones: one that crashes or hangs
    is a failed test. `--conformance-full`, `--conformance-groups` and `--conformance-time-limit`
    are options of pytest.

    Attributes:
        backend: A name that `torch.compile` takes, MODULE:FUNCTION or FILE.py:FUNCTION. The other
            process has to find it: what only this one has registered does not exist there.
        groups: Some of "operators", "gradients", "semantics", "weights", "traffic", "models".
        samples: Largest number for each operator; None: all.
        dtypes: Dtypes of operators.
        share: One in this many operators is tried.
        only: Patterns, as the shell's, one of which the name of a check matches; empty: all.
        time_limit_s: Seconds that a check may take.
        known_failures: Why checks fail that are known to, by the text in brackets of the test. Such
            a test fails if its check passes.
    """

    backend: ClassVar[str] = ""
    groups: ClassVar[tuple[Group, ...]] = ("semantics", "weights", "traffic")
    samples: ClassVar[int | None] = 1
    dtypes: ClassVar[tuple[str, ...]] = ("float32",)
    share: ClassVar[int] = 1
    only: ClassVar[tuple[str, ...]] = ()
    time_limit_s: ClassVar[float] = 180.0
    known_failures: ClassVar[Mapping[str, str]] = {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Makes a test of each check."""
        if "conformance_check" not in metafunc.fixturenames:
            return
        settings = self._settings(metafunc.config)
        found = catalogue.checks(settings)
        unknown = set(self.known_failures) - set(map(str, found))
        if unknown and settings == self._settings(None) and not self.only:
            raise OptionError(f"known_failures names no check: {', '.join(sorted(unknown))}.")
        metafunc.parametrize("conformance_check", found, ids=str)

    @pytest.fixture(scope="class")
    def conformance_run(self, request: pytest.FixtureRequest) -> Iterator[Run]:
        """Runs checks one after the other, in another process."""
        require_backend(self.backend)
        work = CheckRunner(self._settings(request.config))
        with Worker(work) as worker:
            yield lambda check: worker.result(check, work.broke_down, work.settings.limit_s)

    def test_check(self, conformance_check: Check, conformance_run: Run) -> None:
        """A check passes, or fails as it is known to."""
        outcome = conformance_run(conformance_check)
        reason = self.known_failures.get(str(conformance_check))
        if outcome.status in UNTRIED:
            pytest.skip(outcome.reason or "eager accepts no sample")
        if outcome.failed and reason is not None:
            pytest.xfail(f"{reason} ({outcome.status}: {outcome.reason})")
        if outcome.failed:
            pytest.fail(f"{outcome.status}: {outcome.reason}", pytrace=False)
        if reason is not None:
            pytest.fail(
                f"this check passes; remove it from known_failures ({reason})", pytrace=False
            )

    def _settings(self, config: pytest.Config | None) -> Settings:
        """Returns the class's, changed by pytest's options if these are given."""
        if not self.backend:
            raise OptionError(
                f"{type(self).__name__} needs a backend; set the class attribute backend = 'NAME'."
            )
        settings = Settings(
            backend=self.backend,
            groups=tuple(self.groups),
            samples=self.samples,
            dtypes=tuple(self.dtypes),
            share=self.share,
            only=tuple(self.only),
            limit_s=self.time_limit_s,
        )
        if config is None:
            return settings
        if config.getoption("conformance_full", False):
            settings = dataclasses.replace(
                settings, groups=GROUPS, samples=None, dtypes=DTYPES, share=1, every_model=True
            )
        groups = config.getoption("conformance_groups", None)
        limit_s = config.getoption("conformance_time_limit", None)
        return dataclasses.replace(
            settings,
            groups=_groups(groups) if groups else settings.groups,
            limit_s=settings.limit_s if limit_s is None else limit_s,
        )


def _groups(text: str) -> tuple[Group, ...]:
    named = text.split(",")
    unknown = set(named) - set(GROUPS)
    if unknown:
        raise pytest.UsageError(
            f"--conformance-groups: unknown group {', '.join(sorted(unknown))}; valid groups: "
            f"{', '.join(GROUPS)}."
        )
    return tuple(group for group in GROUPS if group in named)
