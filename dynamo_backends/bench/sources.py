"""Where the models of a benchmark run come from."""

from collections.abc import Callable, Sequence
from pathlib import Path

from dynamo_backends.bench.cells import How
from dynamo_backends.bench.suites import SUITES, ModelCase, Scale, find_cases
from dynamo_backends.bench.suites.changing import StreamCase, generation, traffic
from dynamo_backends.bench.suites.files import from_file
from dynamo_backends.bench.suites.huggingface import huggingface
from dynamo_backends.bench.suites.timm import timm
from dynamo_backends.bench.suites.torchbench import torchbench
from dynamo_backends.interface.errors import ModelError, did_you_mean

_BATCH = 4

Case = ModelCase | StreamCase
Source = Callable[[How, int | None], Sequence[Case]]

_LISTS: dict[str, Source] = {
    "huggingface": lambda how, batch: huggingface(how.scale, batch),
    "timm": lambda how, batch: timm(how.scale, batch),
    "traffic": lambda how, batch: _without_batch(how, batch, traffic),
    "generation": lambda how, batch: _without_batch(how, batch, generation),
    "torchbench": lambda how, batch: torchbench(how.path, batch),
}

NAMES = (*SUITES, *_LISTS)
"""Suites that have a name; others are FILE.py:MODELS."""


def cases(how: How, batch: int | None = None) -> Sequence[Case]:
    """The models of a suite.

    Args:
        how: Which suite, and its path and scale.
        batch: Examples per call; None: as many as the suite takes.

    Raises:
        ModelError: There is no such suite, or something is missing that it needs.
    """
    if how.suite in SUITES:
        return SUITES[how.suite](how.scale, batch or _BATCH)
    if how.suite in _LISTS:
        return _LISTS[how.suite](how, batch)
    file, _, name = how.suite.rpartition(":")
    if file.endswith(".py"):
        return from_file(Path(file), name, batch)
    raise ModelError(
        f"there is no suite {how.suite!r}.{did_you_mean(how.suite, NAMES)} There are: "
        f"{', '.join(NAMES)}, and FILE.py:MODELS for models of your own."
    )


def find(how: How, model: str, batch: int | None = None) -> Case:
    """A model of a suite; see `cases`.

    Raises:
        ModelError: There is no such model.
    """
    return named(cases(how, batch), [model])[0]


def has_mode(case: Case, mode: str) -> bool:
    """Whether a model is measured in a mode; streams of requests are for one each."""
    return not isinstance(case, StreamCase) or case.mode == mode


def named(known: Sequence[Case], names: Sequence[str]) -> list[Case]:
    """The models of these names, in their order.

    Raises:
        ModelError: There is no such model.
    """
    try:
        return find_cases(known, names)
    except ValueError as error:
        raise ModelError(str(error)) from error


def _without_batch(
    how: How, batch: int | None, suite: Callable[[Scale], Sequence[Case]]
) -> Sequence[Case]:
    if batch is not None:
        raise ModelError(f"requests of the suite {how.suite} have batch sizes of their own.")
    return suite(how.scale)
