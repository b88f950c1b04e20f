"""Models that generate, from small configurations with seeded weights, and prompts for them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dynamo_backends.bench.suites.weights import randomize_weights
from dynamo_backends.bench.torchvision_shim import import_transformers

VOCABULARY = 512
BUCKET = 32
"""Prompts are padded to a multiple of this many tokens."""

Prompt = dict[str, Tensor]
"""Arguments of `generate`."""


@dataclass(frozen=True)
class Architecture:
    """A model with a cache.

    Attributes:
        build: Makes it, for a number of layers and features.
        prompt: Makes a prompt of a number of tokens, padded to a bucket.
        caches: Which of the caches it has.
    """

    build: Callable[[int, int], Any]
    prompt: Callable[[Any, int], Prompt]
    caches: tuple[str, ...] = ("static", "default")

    def make(self, layers: int, features: int) -> Any:
        """Returns the model in eval mode, the same in every process."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model: nn.Module = self.build(layers, features).eval()
            randomize_weights(model, lambda: model(**self._example(model)))
        return model

    def _example(self, model: Any) -> dict[str, Any]:
        prompt = dict(self.prompt(model, 8))
        if model.config.is_encoder_decoder:
            prompt.setdefault("decoder_input_ids", torch.ones(1, 4, dtype=torch.int64))
        return prompt

    def prompts(self, model: Any, lengths: tuple[int, ...]) -> list[Prompt]:
        """Prompts of these lengths, the same in every process."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return [self.prompt(model, n) for n in lengths]


def generate(model: Any, prompt: Prompt, tokens: int, cache: str, **how: Any) -> Tensor:
    """Returns the tokens that follow a prompt, greedily.

    Args:
        model: The model; its `forward` may be compiled.
        prompt: Arguments of `generate`.
        tokens: How many are generated.
        cache: "static" or "default".
        **how: Further arguments of `generate`.
    """
    from transformers import GenerationMixin

    settings: dict[str, Any] = {"do_sample": False, "disable_compile": True, **how}
    if cache == "static":
        settings["cache_implementation"] = "static"
    # Whisper's own `generate` cuts audio into windows; this is the loop below it.
    result: Any = GenerationMixin.generate(
        model, **prompt, min_new_tokens=tokens, max_new_tokens=tokens, **settings
    )
    return result


def _ids(length: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (1, length))


def _padded(ids: Tensor, left: bool) -> Prompt:
    """Ids and mask of a multiple of `BUCKET` tokens, as tokenizers make them."""
    missing = -ids.shape[1] % BUCKET
    sides = (missing, 0) if left else (0, missing)
    pad = nn.functional.pad
    return {"input_ids": pad(ids, sides), "attention_mask": pad(torch.ones_like(ids), sides)}


def _decoder_prompt(_: Any, length: int) -> Prompt:
    return _padded(_ids(length), left=True)


def _encoder_prompt(_: Any, length: int) -> Prompt:
    return _padded(_ids(length), left=False)


def _audio(model: Any, length: int) -> Prompt:
    bins, frames = model.config.num_mel_bins, 2 * model.config.max_source_positions
    ids = torch.ones(1, 4, dtype=torch.int64)  # a prompt of Whisper's has always four tokens
    return {"input_features": torch.randn(1, bins, frames), "decoder_input_ids": ids}


_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "vocab_size": VOCABULARY}


def _of(architecture: str, settings: Callable[[int, int], dict[str, Any]]) -> Callable[..., Any]:
    def build(layers: int, features: int) -> Any:
        kind = getattr(import_transformers(), architecture)
        return kind(kind.config_class(**_TOKENS, **settings(layers, features)))

    return build


def _grouped(n: int, d: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": n, "hidden_size": d, "intermediate_size": 4 * d,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 16384,
        "tie_word_embeddings": False,
    }  # fmt: skip


def _gpt2(n: int, d: int) -> dict[str, Any]:
    return {"n_layer": n, "n_embd": d, "n_head": 8, "n_positions": 1024}


def _t5(n: int, d: int) -> dict[str, Any]:
    return {
        "num_layers": n, "d_model": d, "d_kv": d // 8, "d_ff": 4 * d, "num_heads": 8,
        "decoder_start_token_id": 0,
    }  # fmt: skip


def _whisper(n: int, d: int) -> dict[str, Any]:
    sides = ("encoder", "decoder")
    return {
        "d_model": d, "num_mel_bins": 16, "max_source_positions": 100, "max_target_positions": 448,
        "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None,
        **{f"{side}_{k}": v for side in sides
           for k, v in (("layers", n), ("attention_heads", 8), ("ffn_dim", 4 * d))},
    }  # fmt: skip


ARCHITECTURES = {
    "llama": Architecture(_of("LlamaForCausalLM", _grouped), _decoder_prompt),
    "qwen": Architecture(_of("Qwen2ForCausalLM", _grouped), _decoder_prompt),
    "gpt2": Architecture(_of("GPT2LMHeadModel", _gpt2), _decoder_prompt),
    "mamba": Architecture(
        _of("MambaForCausalLM", lambda n, d: {"num_hidden_layers": n, "hidden_size": d}),
        _decoder_prompt,
        ("default",),
    ),
    "t5": Architecture(_of("T5ForConditionalGeneration", _t5), _encoder_prompt),
    "whisper": Architecture(_of("WhisperForConditionalGeneration", _whisper), _audio),
}
