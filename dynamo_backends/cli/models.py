"""Builds the models that the command line names, and reads calls of them (`--traffic`)."""

import difflib
import importlib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from dynamo_backends.bench.factories import Loaded, from_file, require
from dynamo_backends.bench.suites.smaller import shrink
from dynamo_backends.bench.torchvision_shim import import_torchvision, import_transformers
from dynamo_backends.capture.precompile import resize_by_repeating
from dynamo_backends.interface.errors import ModelError, did_you_mean, reraise_as_model_error

_BATCH = 2
_TOKENS = 32


def _build_transformers(
    transformers: ModuleType, name: str, batch: int, small: bool
) -> tuple[Any, dict[str, Any]]:
    """Returns a model with random weights, and keyword arguments for a call of it.

    Args:
        transformers: The package.
        name: A configuration ("BertConfig") or a model class ("BertForMaskedLM").
        batch: Number of sequences or images.
        small: Two layers and 512 words instead of the default settings.

    Raises:
        ModelError: There is no such class, or it is not known what the model takes.
    """
    kind: Any = getattr(transformers, name, None)
    is_config = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedConfig)
    is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
    if not (is_config or (is_model and kind.config_class is not None)):
        known = [n for n in dir(transformers) if n.endswith(("Config", "Model"))]
        hint = did_you_mean(name, known)
        raise ModelError(f"transformers has no configuration or model class {name!r}.{hint}")
    config = kind() if is_config else kind.config_class()
    if small:
        shrink(config)
    try:
        model = transformers.AutoModel.from_config(config) if is_config else kind(config)
    except ValueError as error:
        raise ModelError(
            f"transformers cannot create a model from {name} without further settings: "
            f"{str(error).splitlines()[0]} Name a model class, such as hf:BertForMaskedLM."
        ) from error
    return model, _inputs(model, config, batch)


def _inputs(model: Any, config: Any, batch: int) -> dict[str, Any]:
    main = model.main_input_name
    parameters = inspect.signature(model.forward).parameters
    if main == "input_ids":
        inputs: dict[str, Any] = {"input_ids": _words(config, batch)}
    elif main == "pixel_values":
        size = getattr(config, "image_size", 224)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = getattr(config, "num_channels", 3)
        inputs = {"pixel_values": torch.rand(batch, channels, height, width)}
    elif main == "input_values":
        inputs = {"input_values": torch.randn(batch, 16_000)}
    elif main == "input_features" and hasattr(config, "max_source_positions"):
        length = 2 * config.max_source_positions
        inputs = {"input_features": torch.randn(batch, config.num_mel_bins, length)}
    else:
        raise ModelError(
            f"the input {main!r} of {type(model).__name__} is not supported. Write a factory "
            "function and pass path/to/file.py:FACTORY."
        )
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
        inputs["decoder_input_ids"] = _words(config, batch)
    if "use_cache" in parameters:
        inputs["use_cache"] = False
    return inputs


def _words(config: Any, batch: int) -> torch.Tensor:
    return torch.randint(config.vocab_size, (batch, _TOKENS))


FORMS = "hf:NAME, torchvision:NAME, timm:NAME or path/to/file.py:FACTORY"


def load(name: str, batch: int | None = None, small: bool = False) -> Loaded:
    """Builds the model that MODEL names.

    Args:
        name: In one of the forms that `dynamo-backends explain --help` lists.
        batch: Number of images or sequences in the inputs; by default 2, or the default of a
            function in a file.
        small: Make transformers' models small: few layers, few words.

    Raises:
        ModelError: The name has none of these forms, nothing has that name, or a package is
            missing; the message says what to do.
    """
    kind, colon, rest = name.rpartition(":")
    if not colon or not rest or not kind:
        raise ModelError(f"MODEL must be {FORMS}, not {name!r}.")
    if kind in _SOURCES:
        with reraise_as_model_error(f"{name} cannot be built"):
            try:
                return _SOURCES[kind](rest, batch or _BATCH, small)
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
    raise ModelError(f"MODEL must be {FORMS}, not {name!r}.{hint}")


def _hf(name: str, batch: int, small: bool) -> Loaded:
    model, inputs = _build_transformers(import_transformers(), name, batch, small)
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


FORM = '{"model": "torchvision:resnet18", "calls": [[[1, 3, 224, 224]], [[2, 3, 224, 224]]]}'


@dataclass(frozen=True)
class Traffic:
    """The model and calls that a traffic file describes.

    Attributes:
        model: As for `cli.models.load`; empty if the file names none.
        calls: For each call the shapes of its tensors, in order or by the names of arguments.
    """

    model: str
    calls: tuple[Any, ...]


def read(path: Path) -> Traffic:
    """Reads a file of calls (see `Traffic`).

    Raises:
        ModelError: It cannot be read, or has another form; the message says which.
    """
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    calls = given.get("calls") if isinstance(given, dict) else None
    if not isinstance(calls, list) or not calls or not all(map(_is_call, calls)):
        raise ModelError(f"{path} must have the form {FORM}.")
    return Traffic(str(given.get("model", "")), tuple(calls))


def arguments(loaded: Loaded, call: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the model's own arguments, repeated or cut to the shapes of a call.

    Args:
        loaded: The model and the arguments of one call.
        call: An entry of `Traffic.calls`.

    Raises:
        ModelError: The shapes do not fit the arguments.
        OptionError: A tensor has another number of dimensions.
    """
    args, kwargs = list(loaded.args), dict(loaded.kwargs)
    places: list[tuple[Any, Any]] = [
        *((args, i) for i, x in enumerate(args) if isinstance(x, Tensor)),
        *((kwargs, k) for k, x in kwargs.items() if isinstance(x, Tensor)),
    ]
    shapes: Mapping[Any, Any] = (
        call if isinstance(call, Mapping) else dict(enumerate(call))  # in the order of `places`
    )
    known = {key if isinstance(call, Mapping) else i: (of, key)
             for i, (of, key) in enumerate(places)}  # fmt: skip
    for name, shape in shapes.items():
        if name not in known:
            raise ModelError(
                f"a call gives a shape for {name!r}, but the tensors of the model's example are "
                f"{list(known)}."
            )
        of, key = known[name]
        of[key] = resize_by_repeating(of[key], shape)
    return tuple(args), kwargs


def _is_call(call: Any) -> bool:
    if not isinstance(call, list | dict):
        return False
    shapes = list(call.values() if isinstance(call, dict) else call)
    return all(isinstance(s, list) and all(map(_is_size, s)) for s in shapes)


def _is_size(number: Any) -> bool:
    return isinstance(number, int) and number >= 0
