"""Builds the models that the command line names, with random weights and inputs."""

import difflib
import importlib
from collections.abc import Callable
from pathlib import Path

import torch

from dynamo_backends.bench.factories import Loaded, from_file, require
from dynamo_backends.bench.torchvision_shim import import_torchvision, import_transformers
from dynamo_backends.cli.transformers import build as build_transformers
from dynamo_backends.interface.errors import ModelError, as_model_error

FORMS = "hf:NAME, torchvision:NAME, timm:NAME or path/to/file.py:FACTORY"


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
        with as_model_error(f"{name} cannot be built"):
            try:
                return _SOURCES[kind](rest, batch, small)
            except ModuleNotFoundError as error:
                if error.name not in _PACKAGES:
                    raise
                raise ModelError(
                    f"{name} needs {error.name}, which is not installed; run: "
                    f"{_PACKAGES[error.name]}"
                ) from error
    if kind.endswith(".py"):
        return from_file(Path(kind).expanduser(), rest, batch)
    near = difflib.get_close_matches(kind, _SOURCES, 1)
    hint = f" Did you mean {near[0]}:{rest}?" if near else ""
    raise ModelError(f"MODEL is {FORMS}, not {name!r}.{hint}")


def _hf(name: str, batch: int, small: bool) -> Loaded:
    model, inputs = build_transformers(import_transformers(), name, batch, small)
    return Loaded(model, (), inputs)


def _torchvision(name: str, batch: int, small: bool) -> Loaded:
    models = import_torchvision().models
    require(name, models.list_models(), "torchvision", "model")
    size = 299 if name == "inception_v3" else 224
    options = {"init_weights": True} if name in ("inception_v3", "googlenet") else {}
    model = models.get_model(name, weights=None, **options)
    return Loaded(model, (torch.rand(batch, 3, size, size),))


def _timm(name: str, batch: int, small: bool) -> Loaded:
    import_torchvision()
    timm = importlib.import_module("timm")
    require(name, timm.list_models(), "timm", "model")
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
