"""The CPU list of PyTorch's own runner for transformers, with its sizes and random weights.

Names, batch sizes, lengths of sequences and kinds of inputs are those of benchmarks/dynamo in
PyTorch's repository (huggingface.py, huggingface_models_list_cpu.txt). Configurations are the
defaults of transformers' classes; those that the runner downloads are written out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dynamo_backends.bench.suites.case import Inputs, ModelCase, Scale
from dynamo_backends.bench.suites.smaller import shrink
from dynamo_backends.bench.torchvision_shim import import_transformers

_ATTENTION = frozenset({"attention"})
_SHORT = 32  # tokens at scale "test"
_BLOCK = 2  # tokens of a block there: with its usual ones BigBird's attention would not be sparse


@dataclass(frozen=True)
class Listed:
    """A model of the list.

    Attributes:
        batch: Sequences per call.
        length: Tokens of a sequence.
        architecture: transformers' class; empty: the name.
        settings: Settings of its configuration, where they are not the defaults.
        decoder: It is given its input as the decoder's, too.
        zeros: Its tokens are all 0: others need more positions than it has.
    """

    batch: int
    length: int = 128
    architecture: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    decoder: bool = False
    zeros: bool = False


_PAD = {"pad_token_id": 0}
_LONGFORMER = {
    "attention_window": [512] * 12,
    "max_position_embeddings": 4098,
    "type_vocab_size": 1,
    "vocab_size": 50265,
    "layer_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "sep_token_id": 2,
    "pad_token_id": 1,
}

MODELS: Mapping[str, Listed] = {
    "AlbertForMaskedLM": Listed(4, 512),
    "AllenaiLongformerBase": Listed(4, 1024, "LongformerForMaskedLM", _LONGFORMER),
    "BartForCausalLM": Listed(4, 1024),
    "BertForMaskedLM": Listed(16, 512),
    "BigBird": Listed(32, 1024, "BigBirdForMaskedLM", {"attention_type": "block_sparse"}),
    "BlenderbotForCausalLM": Listed(32),
    "DebertaV2ForMaskedLM": Listed(16, 512),
    "DistilBertForMaskedLM": Listed(128),
    "DistillGPT2": Listed(16, 512, "GPT2LMHeadModel", {"n_layer": 6}),
    "ElectraForCausalLM": Listed(8, 512),
    "GoogleFnet": Listed(16, 512, "FNetForMaskedLM"),
    "GPT2ForSequenceClassification": Listed(4, 1024, settings=_PAD),
    "LayoutLMForMaskedLM": Listed(16, 512),
    "M2M100ForConditionalGeneration": Listed(16, decoder=True),
    "MBartForCausalLM": Listed(4, 1024),
    "MegatronBertForCausalLM": Listed(4, 512),
    "MobileBertForMaskedLM": Listed(64),
    "MT5ForConditionalGeneration": Listed(16, decoder=True),
    "OPTForCausalLM": Listed(2, 2048),
    "PegasusForCausalLM": Listed(32),
    "PLBartForCausalLM": Listed(8, 1024),
    "RobertaForCausalLM": Listed(16, 512, settings=_PAD, zeros=True),
    "T5ForConditionalGeneration": Listed(4, 1024, decoder=True),
    "T5Small": Listed(1, 1024, "T5ForConditionalGeneration", decoder=True),
    "TrOCRForCausalLM": Listed(32, 256),
    "XGLMForCausalLM": Listed(8),
    "XLNetLMHeadModel": Listed(8, 512),
    "YituTechConvBert": Listed(16, 512, "ConvBertForMaskedLM"),
}
"""By name."""


def huggingface(scale: Scale = "bench", batch: int | None = None) -> list[ModelCase]:
    """Returns the suite of the transformers list of PyTorch's runners.

    Args:
        scale: "bench": sizes of the list. "test": two layers, 512 words, 32 tokens.
        batch: Sequences per call; None: as many as the list has.
    """
    return [_case(name, listed, scale, batch) for name, listed in MODELS.items()]


def _case(name: str, listed: Listed, scale: Scale, batch: int | None) -> ModelCase:
    architecture = listed.architecture or name

    def config() -> Any:
        made = getattr(import_transformers(), architecture).config_class(**listed.settings)
        if scale == "test":
            shrink(made)
            if hasattr(made, "block_size"):
                made.block_size = _BLOCK
        if hasattr(made, "use_cache"):
            made.use_cache = False
        if isinstance(getattr(made, "attention_window", None), list):
            made.attention_window = made.attention_window[: made.num_hidden_layers]
        return made

    def build() -> Any:
        return getattr(import_transformers(), architecture)(config())

    def example() -> Inputs:
        length = listed.length if scale == "bench" else min(listed.length, _SHORT)
        count = batch or (listed.batch if scale == "bench" else 2)
        return _inputs(architecture, listed, config(), count, length)

    return ModelCase(name, build, example, _ATTENTION, enliven=False)


def _inputs(
    architecture: str, listed: Listed, config: Any, batch: int, length: int
) -> dict[str, Tensor]:
    words = torch.randint(1 if listed.zeros else config.vocab_size, (batch, length))
    if "Bart" in architecture:
        words[:, -1] = config.eos_token_id
    inputs = {"input_ids": words}
    if listed.decoder:
        inputs["decoder_input_ids"] = words
    if architecture.endswith("SequenceClassification"):
        inputs["labels"] = torch.randint(max(1, config.num_labels - 1), (batch,))
    else:
        inputs["labels"] = torch.randint(config.vocab_size - 1, (batch, length))
    return inputs
