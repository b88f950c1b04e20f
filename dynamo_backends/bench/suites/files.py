"""Models of a user's file: `FILE.py:MODELS`."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dynamo_backends.bench.factories import Loaded, made_by, named_in
from dynamo_backends.bench.suites.case import Inputs, ModelCase
from dynamo_backends.interface.errors import ModelError, as_model_error


def from_file(path: Path, name: str, batch: int | None) -> list[ModelCase]:
    """The models of a file.

    Args:
        path: The file.
        name: A dict from names of models to functions that make them (see `factories.made_by`), or
            a function that returns such a dict.
        batch: What the functions are given as `batch`.

    Raises:
        ModelError: There is no such file or name, or it is something else.
    """
    found = named_in(path, name)
    with as_model_error(f"{path}:{name} cannot make models", str(path)):
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
            "bench calls models with positional or with keyword arguments; a file's model has both."
        )
    return dict(made.kwargs) if made.kwargs else made.args
