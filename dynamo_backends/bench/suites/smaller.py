"""Configurations of transformers for small models."""

from typing import Any

_WORDS = 512
# What the configurations call the number of layers and of words.
_LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
)
_SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")


def shrink(config: Any) -> None:
    """Leaves two layers and 512 words of a configuration, in place."""
    for name in _LAYERS:
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(2, getattr(config, name)))
    if isinstance(getattr(config, "vocab_size", None), int):
        config.vocab_size = min(config.vocab_size, _WORDS)
        for name in _SPECIAL_TOKENS:
            token = getattr(config, name, None)
            if isinstance(token, int) and token >= config.vocab_size:
                setattr(config, name, 0)
