"""Models of transformers from their configurations, and inputs for them."""

import inspect
from types import ModuleType
from typing import Any

import torch

from dynamo_backends.bench.suites.smaller import shrink
from dynamo_backends.interface.errors import ModelError, did_you_mean

_TOKENS = 32


def build(
    transformers: ModuleType, name: str, batch: int, small: bool
) -> tuple[Any, dict[str, Any]]:
    """A model with random weights, and keyword arguments for a call of it.

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
