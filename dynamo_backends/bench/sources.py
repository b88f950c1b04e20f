"""Finds the models of a benchmark run."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dynamo_backends.bench.cells import BenchConfig
from dynamo_backends.bench.factories import Loaded, made_by, named_in
from dynamo_backends.bench.suites import SUITES, Scale, find_cases
from dynamo_backends.bench.suites.case import Inputs, ModelCase
from dynamo_backends.bench.suites.catalogue import gpu
from dynamo_backends.bench.suites.huggingface import huggingface
from dynamo_backends.bench.suites.streams import StreamCase, generation, traffic
from dynamo_backends.bench.suites.timm import timm
from dynamo_backends.bench.suites.torchbench import torchbench
from dynamo_backends.interface.errors import ModelError, did_you_mean, reraise_as_model_error


def from_file(path: Path, name: str, batch: int | None) -> list[ModelCase]:
    """Returns the models of a file.

    Args:
        path: The file.
        name: A dict from names of models to functions that make them (see `factories.made_by`), or
            a function that returns such a dict.
        batch: What the functions are given as `batch`.

    Raises:
        ModelError: There is no such file or name, or it is something else.
    """
    found = named_in(path, name)
    with reraise_as_model_error(f"{path}:{name} cannot make models", str(path)):
        models = found if isinstance(found, Mapping) else found()
    if not isinstance(models, Mapping) or not all(map(callable, models.values())):
        raise ModelError(
            f"{path}:{name} must be a dict from names to functions that make models, or a function "
            f"that returns one, not {type(models).__name__}."
        )
    return [_case(str(key), make, batch, f"{path}:{key}") for key, make in models.items()]


def _case(name: str, make: Callable[..., Any], batch: int | None, title: str) -> ModelCase:
    def inputs() -> Inputs:
        made = made_by(make, batch, title)
        return _inputs(made)

    def build() -> Any:
        return made_by(make, batch, title).model

    return ModelCase(name, build, inputs, enliven=False)


def _inputs(made: Loaded) -> Inputs:
    if made.args and made.kwargs:
        raise ModelError(
            "bench supports models with positional or keyword arguments, but the model in this "
            "file has both. Use one kind."
        )
    return dict(made.kwargs) if made.kwargs else made.args


_BATCH = 4

Case = ModelCase | StreamCase
Source = Callable[[BenchConfig, int | None], Sequence[Case]]

_LISTS: dict[str, Source] = {
    "gpu": lambda how, batch: gpu(how.scale, batch or _BATCH),
    "huggingface": lambda how, batch: huggingface(how.scale, batch),
    "timm": lambda how, batch: timm(how.scale, batch),
    "traffic": lambda how, batch: _without_batch(how, batch, traffic),
    "generation": lambda how, batch: _without_batch(how, batch, generation),
    "torchbench": lambda how, batch: torchbench(how.path, batch),
}

NAMES = (*SUITES, *_LISTS)
"""Suites that have a name; others are FILE.py:MODELS."""


def cases(how: BenchConfig, batch: int | None = None) -> Sequence[Case]:
    """Returns the models of a suite.

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


def find(how: BenchConfig, model: str, batch: int | None = None) -> Case:
    """Returns a model of a suite; see `cases`.

    Raises:
        ModelError: There is no such model.
    """
    return named(cases(how, batch), [model])[0]


def has_mode(case: Case, mode: str) -> bool:
    """Returns whether a model is measured in a mode; streams of requests are for one each."""
    return not isinstance(case, StreamCase) or case.mode == mode


def named(known: Sequence[Case], names: Sequence[str]) -> list[Case]:
    """Returns the cases with these names, in their order.

    Raises:
        ModelError: There is no such model.
    """
    try:
        return find_cases(known, names)
    except ValueError as error:
        raise ModelError(str(error)) from error


def _without_batch(
    how: BenchConfig, batch: int | None, suite: Callable[[Scale], Sequence[Case]]
) -> Sequence[Case]:
    if batch is not None:
        raise ModelError(f"the suite {how.suite} defines its own batch sizes; leave out --batch.")
    return suite(how.scale)
