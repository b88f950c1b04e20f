"""Smaller versions of published models: by their configuration, or by leaving out layers."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from torch import nn

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
_KEPT = 2  # of blocks alike: they may differ in what weights do not show, such as shifted windows


def shrink(config: Any) -> None:
    """Leaves two layers and 512 words of a transformer's configuration, in place."""
    for name in _LAYERS:
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(2, getattr(config, name)))
    if isinstance(getattr(config, "vocab_size", None), int):
        config.vocab_size = min(config.vocab_size, _WORDS)
        for name in _SPECIAL_TOKENS:
            token = getattr(config, name, None)
            if isinstance(token, int) and token >= config.vocab_size:
                setattr(config, name, 0)


def shorten(model: nn.Module) -> None:
    """Leaves two of the blocks alike that follow each other, in place.

    Blocks are modules in an `nn.Sequential` or `nn.ModuleList` that consist of others; they are
    alike if their classes and the shapes of their weights are.
    """
    for container in list(model.modules()):
        if isinstance(container, nn.Sequential | nn.ModuleList):
            for i in reversed(_surplus(list(container))):
                del container[i]


def _surplus(blocks: Sequence[nn.Module]) -> list[int]:
    """Returns the positions of blocks that repeat earlier ones, beyond the few that stay."""
    alike = groupby(enumerate(blocks), lambda numbered: _looks(*numbered))
    return [i for _, group in alike for i, _ in list(group)[_KEPT:]]


def _looks(index: int, block: nn.Module) -> tuple[Any, ...]:
    """Returns what is equal for blocks alike; single layers are alike to none."""
    if not any(True for _ in block.children()):
        return (index,)
    shapes = tuple((name, tensor.shape) for name, tensor in block.state_dict().items())
    return type(block), shapes
