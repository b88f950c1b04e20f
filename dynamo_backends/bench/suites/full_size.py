"""Transformers of the size in which they are published, for figures that carry over to such."""

from typing import Any

from dynamo_backends.bench.suites.case import ModelCase, Scale, tokens
from dynamo_backends.bench.torchvision_shim import import_transformers


def full_size(scale: Scale = "bench", batch: int = 4) -> list[ModelCase]:
    """The suite.

    Args:
        scale: "bench": BERT-base, 12 layers of 768 features, 30,522 words, sequences of 128
            tokens. "test": one layer of 64 features.
        batch: Sequences per call.
    """
    length, words = (128, 30522) if scale == "bench" else (16, 100)
    attention = frozenset({"attention"})

    def build() -> Any:
        transformers = import_transformers()
        if scale == "bench":
            return transformers.BertModel(transformers.BertConfig())
        config = transformers.BertConfig(
            vocab_size=words,
            num_hidden_layers=1,
            hidden_size=64,
            num_attention_heads=2,
            intermediate_size=128,
        )
        return transformers.BertModel(config)

    return [ModelCase("bert_base", build, tokens(batch, length, words), attention)]
