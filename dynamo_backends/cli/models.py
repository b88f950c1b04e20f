"""Builds the models that the command line names, with random weights and inputs."""

import difflib
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dynamo_backends.bench.torchvision_shim import import_torchvision, import_transformers
from dynamo_backends.cli.transformers import build as build_transformers
from dynamo_backends.interface.errors import ModelError, did_you_mean

FORMS = "hf:NAME, torchvision:NAME, timm:NAME or path/to/file.py:FACTORY"


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


def load(name: str, batch: int, small: bool = False) -> Loaded:
    """Builds a model.

    Args:
        name: In one of the forms that `dynamo-backends explain --help` lists.
        batch: Number of images or sequences in the inputs.
        small: Make transformers' models small: few layers, few words.

    Raises:
        ModelError: The name has none of these forms, nothing has that name, or a package is
            missing; the message says what to do.
    """
    kind, colon, rest = name.rpartition(":")
    if not colon or not rest or not kind:
        raise ModelError(f"MODEL is {FORMS}, not {name!r}.")
    if kind in _SOURCES:
        try:
            return _SOURCES[kind](rest, batch, small)
        except ModuleNotFoundError as error:
            if error.name not in _PACKAGES:
                raise
            raise ModelError(
                f"{name} needs {error.name}, which is not installed; run: {_PACKAGES[error.name]}"
            ) from error
    if kind.endswith(".py"):
        return _from_file(Path(kind), rest, batch)
    near = difflib.get_close_matches(kind, _SOURCES, 1)
    hint = f" Did you mean {near[0]}:{rest}?" if near else ""
    raise ModelError(f"MODEL is {FORMS}, not {name!r}.{hint}")


def _hf(name: str, batch: int, small: bool) -> Loaded:
    model, inputs = build_transformers(import_transformers(), name, batch, small)
    return Loaded(model, (), inputs)


def _torchvision(name: str, batch: int, small: bool) -> Loaded:
    models = import_torchvision().models
    _require(name, models.list_models(), "torchvision", "model")
    size = 299 if name == "inception_v3" else 224
    options = {"init_weights": True} if name in ("inception_v3", "googlenet") else {}
    model = models.get_model(name, weights=None, **options)
    return Loaded(model, (torch.rand(batch, 3, size, size),))


def _timm(name: str, batch: int, small: bool) -> Loaded:
    import_torchvision()
    timm = importlib.import_module("timm")
    _require(name, timm.list_models(), "timm", "model")
    model = timm.create_model(name, pretrained=False)
    shape = model.default_cfg.get("input_size", (3, 224, 224))
    return Loaded(model, (torch.rand(batch, *shape),))


_SOURCES: dict[str, Callable[[str, int, bool], Loaded]] = {
    "hf": _hf,
    "torchvision": _torchvision,
    "timm": _timm,
}
_PACKAGES = {
    "transformers": "pip install 'dynamo-backends[bench]'",
    "torchvision": "pip install --no-deps torchvision pillow",
    "timm": "pip install --no-deps timm",
}


def _require(name: str, known: Iterable[str], package: str, what: str) -> None:
    names = list(known)
    if name not in names:
        hint = did_you_mean(name, names)
        raise ModelError(f"{package} has no {what} {name!r}.{hint}")


def _from_file(path: Path, factory: str, batch: int) -> Loaded:
    if not path.is_file():
        raise ModelError(f"there is no file {str(path)!r}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    functions = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
    _require(factory, functions, str(path), "function")
    make = getattr(module, factory)
    given = {"batch": batch} if "batch" in inspect.signature(make).parameters else {}
    return _checked(make(**given), f"{path}:{factory}")


def _checked(made: Any, name: str) -> Loaded:
    if isinstance(made, nn.Module) and hasattr(made, "example_inputs"):
        inputs = made.example_inputs
        made = (made, inputs() if callable(inputs) else inputs)
    if isinstance(made, tuple) and len(made) in (2, 3) and callable(made[0]):
        model, args, *kwargs = made
        args = (args,) if isinstance(args, torch.Tensor) else args
        if isinstance(args, Sequence) and all(isinstance(k, Mapping) for k in kwargs):
            return Loaded(model, tuple(args), dict(kwargs[0]) if kwargs else {})
    raise ModelError(
        f"{name} must return (model, args), (model, args, kwargs) or a module with an attribute "
        f"example_inputs, not {type(made).__name__}."
    )
