"""Tiny models that generate, and prompts for them."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dynamo_backends.bench.torchvision_shim import import_transformers

WORDS = 128
WINDOW = 16

_TOKENS = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0, "vocab_size": WORDS}
_LLAMA = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, **_TOKENS,
}  # fmt: skip
_WHISPER = {
    "d_model": 32, "num_mel_bins": 16, "max_source_positions": 50, "max_target_positions": 128,
    "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None,
    **{f"{side}_{k}": v for side in ("encoder", "decoder")
       for k, v in (("layers", 1), ("attention_heads", 4), ("ffn_dim", 64))},
    **_TOKENS,
}  # fmt: skip
_GEMMA = {"sliding_window": WINDOW, "head_dim": 8, **_LLAMA}
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _LLAMA),
    "qwen": ("Qwen2ForCausalLM", _LLAMA),
    "gpt2": ("GPT2LMHeadModel", {"n_layer": 2, "n_embd": 32, "n_head": 4, **_TOKENS}),
    "mamba": ("MambaForCausalLM", {"num_hidden_layers": 1, "hidden_size": 32, **_TOKENS}),
    "mistral": ("MistralForCausalLM", {"sliding_window": WINDOW, **_LLAMA}),
    "gemma": (
        "Gemma3ForCausalLM",
        {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {"num_layers": 1, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4,
         "decoder_start_token_id": 0, **_TOKENS},
    ),
    "whisper": ("WhisperForConditionalGeneration", _WHISPER),
}  # fmt: skip


def make(name: str, **changes: Any) -> Any:
    """A model in eval mode and float64, whose random weights are large enough to differ.

    Args:
        name: One of `CONFIGURATIONS`.
        changes: Of its configuration.
    """
    architecture, settings = CONFIGURATIONS[name]
    kind = getattr(import_transformers(), architecture)
    torch.manual_seed(0)
    model = kind(kind.config_class(**{**settings, **changes})).eval().double()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(3)
    return model


def prompt(name: str, length: int, batch: int = 1, multiple: int = 1) -> dict[str, Tensor]:
    """Random tokens, of which each row of a batch has two less than the one before it.

    Args:
        name: Of the model.
        length: Of the first row; Whisper's prompts have always four tokens.
        batch: So many rows.
        multiple: What is missing to a multiple of so many is padded: on the left, of encoders on
            the right.
    """
    torch.manual_seed(length)
    if name == "whisper":
        features = torch.randn(batch, 16, 100, dtype=torch.float64)
        ids = torch.ones(batch, 4, dtype=torch.int64)
        return {"input_features": features, "decoder_input_ids": ids}
    ids = torch.randint(3, WORDS, (batch, length))
    is_left = name != "t5"
    places = torch.arange(length)
    skipped = 2 * torch.arange(batch)[:, None]
    seen = places >= skipped if is_left else places < length - skipped
    sides = (-length % multiple, 0) if is_left else (0, -length % multiple)
    return {"input_ids": pad(ids, sides), "attention_mask": pad(seen.long(), sides)}


def generate(model: Any, given: dict[str, Tensor], **how: Any) -> Tensor:
    """What `transformers` generates, with a seed; Whisper's own way cuts audio into windows."""
    torch.manual_seed(5)
    settings = {"do_sample": False, **how}
    generation: Callable[..., Any] = import_transformers().GenerationMixin.generate
    result: Tensor = generation(model, **given, **settings)
    return result


def compiled(model: Any, backend: str, **options: Any) -> Any:
    """A copy whose forward is compiled."""
    model = copy.deepcopy(model)
    model.forward = torch.compile(model.forward, backend=backend, options=options)
    return model
