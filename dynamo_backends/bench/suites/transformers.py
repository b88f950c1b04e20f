"""Architectures from transformers, built from small configurations with seeded weights."""

from collections.abc import Callable
from typing import Any

import torch

from dynamo_backends.bench.suites.case import Inputs, ModelCase, Scale, image, tokens
from dynamo_backends.bench.torchvision_shim import import_transformers

_VOCABULARY = 512
_ATTENTION = frozenset({"attention"})
_VISION = frozenset({"attention", "conv"})
_STATE_SPACE = frozenset({"state_space"})


def transformers(scale: Scale = "bench", batch: int = 4) -> list[ModelCase]:
    """Returns the suite of small transformers.

    Args:
        scale: "bench": 4 layers of 256 features on 128 tokens, images of 128x128; "test": 2 layers
            of 32 features on 12 tokens, images of 64x64.
        batch: Sequences or images per call.
    """
    n, d, length, size = (4, 256, 128, 128) if scale == "bench" else (2, 32, 12, 64)
    text = tokens(batch, length, _VOCABULARY, use_cache=False)
    short = tokens(batch, max(4, length // 4), _VOCABULARY, use_cache=False)  # a step per token
    masked = _masked_tokens(batch, length)
    pixels = _pixels(batch, size)
    sizes = _sizes(n, d, size)
    return [
        _case("gpt2", "GPT2LMHeadModel", text, sizes["gpt2"]),
        _case("llama", "LlamaForCausalLM", text, sizes["llama"]),
        _case("t5_encoder", "T5EncoderModel", masked, sizes["t5"]),
        _case("t5", "T5ForConditionalGeneration", _pairs(batch, length), sizes["t5"]),
        _case("distilbert", "DistilBertModel", masked, sizes["distilbert"]),
        _case("albert", "AlbertModel", masked, sizes["albert"]),
        _whisper_encoder(batch, length, n, d),
        _case("swin", "SwinModel", pixels, sizes["swin"], _VISION),
        _case("convnext", "ConvNextModel", pixels, sizes["convnext"], frozenset({"conv"})),
        _case("segformer", "SegformerForSemanticSegmentation", pixels, sizes["segformer"], _VISION),
        _case("mamba", "MambaForCausalLM", short, sizes["mamba"], _STATE_SPACE),
        _case("rwkv", "RwkvModel", short, sizes["rwkv"], _STATE_SPACE),
    ]


def _sizes(n: int, d: int, image_size: int) -> dict[str, dict[str, Any]]:
    """Settings of the configurations for n layers of d features."""
    vocabulary = {"vocab_size": _VOCABULARY}
    layers = {"num_hidden_layers": n, "hidden_size": d, **vocabulary}
    heads = {"num_attention_heads": 4, "intermediate_size": 2 * d}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return {
        "gpt2": {"n_layer": n, "n_embd": d, "n_head": 4, **ends, **vocabulary},
        "llama": {"num_key_value_heads": 2, **layers, **heads},
        "t5": {
            "d_model": d,
            "d_kv": d // 4,
            "d_ff": 2 * d,
            "num_layers": n,
            "num_heads": 4,
            **vocabulary,
        },
        "distilbert": {"dim": d, "hidden_dim": 2 * d, "n_layers": n, "n_heads": 4, **vocabulary},
        "albert": {"embedding_size": d // 2, **layers, **heads},
        "swin": {
            "image_size": image_size,
            "patch_size": 4,
            "embed_dim": d // 2,
            "window_size": 4,
            "depths": [2, 2],
            "num_heads": [2, 4],
        },
        "convnext": {"depths": [1, 1, n // 2, 1], "hidden_sizes": [d // 2, d, 2 * d, 4 * d]},
        "segformer": {
            "num_encoder_blocks": 2,
            "depths": [n // 2, n // 2],
            "sr_ratios": [4, 2],
            "hidden_sizes": [d // 2, d],
            "num_attention_heads": [1, 2],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": d,
            "num_labels": 5,
        },
        "mamba": {"state_size": 8, **layers},
        "rwkv": layers,
    }


def _case(
    name: str,
    architecture: str,
    example: Callable[[], Inputs],
    settings: dict[str, Any],
    tags: frozenset[str] = _ATTENTION,
) -> ModelCase:
    """Returns a case whose configuration class is the one that the architecture names."""

    def build() -> Any:
        kind = getattr(import_transformers(), architecture)
        return kind(kind.config_class(**settings))

    return ModelCase(name, build, example, tags)


def _masked_tokens(batch: int, length: int) -> Callable[[], Inputs]:
    def example() -> Inputs:
        mask = torch.ones(batch, length, dtype=torch.int64)
        mask[-1, length // 2 :] = 0
        return {"input_ids": torch.randint(_VOCABULARY, (batch, length)), "attention_mask": mask}

    return example


def _pairs(batch: int, length: int) -> Callable[[], Inputs]:
    return lambda: {
        "input_ids": torch.randint(_VOCABULARY, (batch, length)),
        "decoder_input_ids": torch.randint(_VOCABULARY, (batch, length // 2)),
        "use_cache": False,
    }


def _pixels(batch: int, size: int) -> Callable[[], Inputs]:
    images = image(batch, size)
    return lambda: {"pixel_values": images()[0]}


def _whisper_encoder(batch: int, length: int, layers: int, features: int) -> ModelCase:
    mels = 16

    def build() -> Any:
        whisper = import_transformers().WhisperModel
        config = whisper.config_class(
            vocab_size=_VOCABULARY,
            num_mel_bins=mels,
            max_source_positions=length,
            d_model=features,
            encoder_layers=layers,
            encoder_attention_heads=4,
            encoder_ffn_dim=2 * features,
            decoder_layers=1,
            decoder_attention_heads=4,
            decoder_ffn_dim=features,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
            decoder_start_token_id=1,
        )
        return whisper(config).encoder

    def example() -> Inputs:
        return {"input_features": torch.randn(batch, mels, 2 * length)}

    return ModelCase("whisper_encoder", build, example, _VISION)
