"""Users' Python files, and the models that they make with the arguments of one call."""

import importlib.util
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from dynamo_backends.interface.errors import ModelError, did_you_mean, reraise_as_model_error

_BATCH = 2


@dataclass(frozen=True)
class Loaded:
    """A model and the arguments of one call.

    Attributes:
        model: A module or function.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """

    model: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def from_file(path: Path, factory: str, batch: int | None) -> Loaded:
    """Returns what a function in a file makes.

    Args:
        path: The file.
        factory: The function's name.
        batch: Its argument of that name, if it has one; None: its own default.

    Raises:
        ModelError: There is no such file or function, or it returns something else.
    """
    return made_by(named_in(path, factory), batch, f"{path}:{factory}")


def named_in(path: Path, name: str) -> Any:
    """Returns a public function or mapping that a Python file defines.

    Raises:
        ModelError: There is no such file or name.
    """
    if not path.is_file():
        raise ModelError(f"there is no file {str(path)!r}.")
    with reraise_as_model_error(f"{path} cannot be imported", str(path)):
        module = load_file(path)
    public = {n: v for n, v in vars(module).items() if not n.startswith("_")}
    known = [n for n, v in public.items() if callable(v) or isinstance(v, Mapping)]
    require(name, known, str(path), "function")
    return public[name]


def made_by(factory: Callable[..., Any], batch: int | None, name: str) -> Loaded:
    """Calls a user's model factory and returns the model and its example arguments.

    Args:
        factory: Returns (model, args), (model, args, kwargs), or a module that has its example
            inputs as the attribute `example_inputs`.
        batch: Given if it has such a parameter; None: its default, or 2.
        name: For messages.

    Raises:
        ModelError: It returns something else.
    """
    with reraise_as_model_error(f"{name} cannot make a model"):
        parameter = inspect.signature(factory).parameters.get("batch")
        if parameter is not None and parameter.default is parameter.empty:
            batch = batch or _BATCH
        made = factory(**({} if parameter is None or batch is None else {"batch": batch}))
        if isinstance(made, nn.Module) and hasattr(made, "example_inputs"):
            inputs = made.example_inputs
            made = (made, inputs() if callable(inputs) else inputs)
    return _checked(made, name)


def require(name: str, known: Iterable[str], package: str, what: str) -> None:
    """Checks that there is a name.

    Raises:
        ModelError: There is not; the message has the nearest one.
    """
    names = list(known)
    if name not in names:
        hint = did_you_mean(name, names)
        raise ModelError(f"{package} has no {what} {name!r}.{hint}")


def _checked(made: Any, name: str) -> Loaded:
    if isinstance(made, tuple) and len(made) in (2, 3) and callable(made[0]):
        model, args, *kwargs = made
        args = (args,) if isinstance(args, torch.Tensor) else args
        if isinstance(args, Sequence) and all(isinstance(k, Mapping) for k in kwargs):
            return Loaded(model, tuple(args), dict(kwargs[0]) if kwargs else {})
    raise ModelError(
        f"{name} must return (model, args), (model, args, kwargs) or a module with an attribute "
        f"example_inputs, not {type(made).__name__}."
    )


def load_file(path: Path) -> ModuleType:
    """Imports a Python file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
