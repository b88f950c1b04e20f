"""Lists the checks, and runs one in this process."""

import fnmatch
import importlib.util
import time
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from dynamo_backends.conformance import models, semantics, traffic, weights
from dynamo_backends.conformance.outcomes import (
    GROUPS,
    Check,
    Group,
    Outcome,
    how_it_ended,
    new_outcome,
)
from dynamo_backends.conformance.rewrites import running as rewrites
from dynamo_backends.conformance.subject import OwnRandomNumbersError, Subject, UntriedError
from dynamo_backends.conformance.workers import TIMEOUT
from dynamo_backends.interface.errors import OptionError, brief_error
from dynamo_backends.interface.logs import silence_loggers

Rule = Callable[[Subject], None]

RULES: Mapping[str, Mapping[str, Rule]] = {
    "semantics": semantics.CHECKS,
    "weights": weights.CHECKS,
    "traffic": traffic.CHECKS,
}
"""Checks that are a function each, by group and name."""

_NOISY = ("dynamo_backends", "torch")
_OWN = ("dynamo_backends/conformance/", "torch/testing/", "dynamo_backends/verify/")


@dataclass(frozen=True)
class Settings:
    """The checks of a backend to run, and how.

    Attributes:
        backend: See `bench.backends.require`.
        groups: Which groups of checks.
        samples: Largest number for each operator, spread over all; None: all.
        dtypes: Dtypes of the operators' inputs, by name.
        share: One in this many operators.
        only: Patterns, as the shell's, one of which a check's name matches; empty: all.
        every_model: Those of the large suites, too.
        limit_s: Seconds that a check may take.
        threads: Threads of torch.
        rewrites: Number of random graphs.
        seed: Seed of the first of these.
    """

    backend: str
    groups: tuple[Group, ...] = GROUPS
    samples: int | None = 1
    dtypes: tuple[str, ...] = ("float32",)
    share: int = 1
    only: tuple[str, ...] = ()
    every_model: bool = False
    limit_s: float = 180.0
    threads: int = 1
    rewrites: int = 100
    seed: int = 0


def checks(settings: Settings) -> list[Check]:
    """Returns all that settings ask for, in the order of the groups.

    Raises:
        OptionError: PyTorch's database of operators lacks a package; or nothing matches.
    """
    found = [check for group in settings.groups for check in _of_group(group, settings)]
    if settings.only:
        found = [c for c in found if any(fnmatch.fnmatch(c.name, p) for p in settings.only)]
    if not found:
        raise OptionError(
            "no check matches --groups, --only and --share. Change or remove these arguments."
        )
    return found


def _of_group(group: Group, settings: Settings) -> Iterator[Check]:
    if group in ("operators", "gradients"):
        yield from (c for c in _operators(group, settings) if _is_chosen(c.name, settings.share))
    elif group == "models":
        yield from (Check(group, name) for name in models.names(settings.every_model))
    elif group == "rewrites":
        for seed in range(settings.seed, settings.seed + settings.rewrites):
            yield Check(group, str(seed))
    else:
        yield from (Check(group, name) for name in RULES[group])


def _is_chosen(name: str, share: int) -> bool:
    return zlib.crc32(name.encode()) % share == 0


def _operators(group: Group, settings: Settings) -> Iterator[Check]:
    require_database()
    from dynamo_backends.conformance.operators import database, gradients

    dtypes = tuple(getattr(torch, name) for name in settings.dtypes)
    listed = database.cases(dtypes) if group == "operators" else gradients.cases(dtypes)
    for op, dtype in listed:
        yield Check(group, database.full_name(op), database.name_of(dtype))


def require_database() -> None:
    """Raises OptionError if a package that torch's OpInfo database imports is missing.

    Raises:
        OptionError: A package is missing.
    """
    if importlib.util.find_spec("expecttest") is None:
        raise OptionError(
            "PyTorch's database of operators needs expecttest, which is not installed; run: "
            "pip install 'dynamo-backends[conformance]'"
        )


class CheckRunner:
    """Runs checks with the same settings in a worker process, and reports crashes."""

    def __init__(self, settings: Settings):
        self.settings = settings

    def __call__(self, check: Check) -> Outcome:
        """Returns the outcome of a check."""
        torch.set_num_threads(self.settings.threads)
        start = time.perf_counter()
        outcome = run(check, self.settings)
        outcome.seconds = round(time.perf_counter() - start, 3)
        return outcome

    def broke_down(self, check: Check, exit_code: int | str) -> Outcome:
        """Returns the outcome of a check during which the process ended, or was ended."""
        outcome = new_outcome(check)
        if exit_code == TIMEOUT:
            outcome.seconds = self.settings.limit_s
            return outcome.fail("timeout", f"did not finish within {self.settings.limit_s:g} s")
        return outcome.fail("crash", how_it_ended(int(exit_code)))


def run(check: Check, settings: Settings) -> Outcome:
    """Runs a check in this process, which it may end.

    Args:
        check: One of `checks`.
        settings: The backend, and the number of samples.
    """
    if check.group in ("operators", "gradients"):
        return _run_operator(check, settings)
    if check.group == "rewrites":
        return rewrites.run(check, settings.backend, shrink_s=settings.limit_s / 4)
    return run_rule(check, rule(check), settings.backend)


def rule(check: Check) -> Rule:
    """Returns the Python function that implements a check of a table."""
    if check.group == "models":
        return lambda subject: models.run(subject, check.name)
    return RULES[check.group][check.name]


def _run_operator(check: Check, settings: Settings) -> Outcome:
    from dynamo_backends.conformance.operators import database, gradients, running

    op, dtype = database.find(check.name), getattr(torch, check.dtype)
    driver = running.run if check.group == "operators" else gradients.run
    return driver(op, dtype, settings.backend, limit=settings.samples)


def run_rule(check: Check, rule: Rule, backend: str) -> Outcome:
    """Runs a check function with a backend; blames torch if aot_eager fails it too.

    Args:
        check: Its name.
        rule: The function.
        backend: Its name.
    """
    outcome = _try(check, rule, Subject(backend))
    if outcome.failed:
        torchs = _try(check, rule, Subject("aot_eager"))
        if torchs.failed:
            return outcome.fail("torch", torchs.reason)
    return outcome


def _try(check: Check, rule: Rule, subject: Subject) -> Outcome:
    outcome = new_outcome(check)
    outcome.samples = 1
    torch._dynamo.reset()
    torch.manual_seed(0)
    with warnings.catch_warnings(), silence_loggers(*_NOISY), subject.watching():
        warnings.simplefilter("ignore")
        try:
            rule(subject)
        except UntriedError as error:
            outcome.fail("no samples", str(error))
        except OwnRandomNumbersError as error:
            outcome.fail("random", str(error))
        except Exception as error:
            _note(outcome, error)
        else:
            outcome.reasons = subject.why_not_whole()
            outcome.settle()
    torch._dynamo.reset()
    return outcome


def _note(outcome: Outcome, error: Exception) -> None:
    """Tells what a comparison found from what a backend raised, which may be an assertion too."""
    where = traceback.extract_tb(error.__traceback__)[-1].filename
    compared = isinstance(error, AssertionError) and any(
        part in Path(where).as_posix() for part in _OWN
    )
    text = " ".join(str(error).split())[:300]
    outcome.fail("wrong", text) if compared else outcome.fail("raises", brief_error(error))
