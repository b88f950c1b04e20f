"""Builds the models that the command line names, with random weights and inputs."""

import difflib
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from dynamo_backends.bench.factories import Loaded, from_file, require
from dynamo_backends.bench.suites.smaller import shrink
from dynamo_backends.bench.torchvision_shim import import_torchvision, import_transformers
from dynamo_backends.interface.errors import ModelError, as_model_error, did_you_mean

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
            f"transformers cannot make a model from {name} alone: {str(error).splitlines()[0]} "
            "Name a model class, such as hf:BertForMaskedLM."
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
            f"it is not known what {type(model).__name__} takes as {main!r}; write a factory: "
            "path/to/file.py:FACTORY."
        )
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
        inputs["decoder_input_ids"] = _words(config, batch)
    if "use_cache" in parameters:
        inputs["use_cache"] = False
    return inputs


def _words(config: Any, batch: int) -> torch.Tensor:
    return torch.randint(config.vocab_size, (batch, _TOKENS))


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
