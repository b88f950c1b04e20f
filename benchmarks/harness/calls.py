"""Calls that are timed one by one, and an encoder to call with sizes that change."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from dynamo_backends.bench.torchvision_shim import import_transformers


def seconds(function: Callable[[], Any], pause_s: float = 0.0) -> float:
    """Times a call, after a pause: threads that slept are slower than those that spin."""
    time.sleep(pause_s)
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def milliseconds(times: Sequence[float], *percentiles: int) -> list[float]:
    """Returns percentiles of seconds."""
    return [float(np.percentile(times or [0.0], p)) * 1e3 for p in percentiles]


def encoder(layers: int) -> Any:
    """Makes an encoder of MiniLM's architecture: 384 features, weights not trained."""
    torch.manual_seed(0)
    transformers = import_transformers()
    config = transformers.BertConfig(
        hidden_size=384, num_attention_heads=12, intermediate_size=1536, num_hidden_layers=layers
    )
    return transformers.BertModel(config, add_pooling_layer=False).eval()


def texts(batch: int, length: int) -> dict[str, torch.Tensor]:
    """Makes arguments of a call of the encoder."""
    sizes = batch, length
    return {"input_ids": torch.randint(1000, sizes), "attention_mask": torch.ones(sizes)}
