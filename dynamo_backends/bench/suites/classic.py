"""Ten models that compilers have been measured on for years: convolutional nets, BERT, a ViT."""

from collections.abc import Callable
from typing import Any

from torch import nn

from dynamo_backends.bench.suites.case import ModelCase, Scale, image, tokens
from dynamo_backends.bench.torchvision_shim import import_torchvision, import_transformers

CONVOLUTIONAL = (
    "resnet18",
    "resnet50",
    "resnext50_32x4d",
    "alexnet",
    "mobilenet_v2",
    "mnasnet1_0",
    "vgg16",
    "squeezenet1_1",
)
"""Builders of torchvision.models."""


def classic(scale: Scale = "bench", batch: int = 4) -> list[ModelCase]:
    """Returns the suite of classic convolutional nets, BERT and ViT.

    Args:
        scale: "bench": images of 224x224, sequences of 128 tokens. "test": images of 64x64, and
            two layers of the transformers.
        batch: Images per call; BERT gets half as many sequences.
    """
    size = 224 if scale == "bench" else 64
    cases = [
        ModelCase(name, _torchvision(name, scale), image(batch, size), frozenset({"conv"}))
        for name in CONVOLUTIONAL
    ]
    bert, length = (_bert(6), 128) if scale == "bench" else (_bert(2, hidden_size=128), 32)
    sequences = tokens(max(1, batch // 2), length, 1000)
    cases.insert(7, ModelCase("bert", bert, sequences, frozenset({"attention"})))
    layers = 12 if scale == "bench" else 2
    vit = _vit_small(size, layers)
    cases.append(ModelCase("vit_s_16", vit, image(batch, size), frozenset({"attention"})))
    return cases


def _torchvision(name: str, scale: Scale) -> Callable[[], nn.Module]:
    def build() -> Any:
        model = import_torchvision().models.get_model(name, weights=None)
        if scale == "test":
            _narrow_classifier(model, 64)
        return model

    return build


def _narrow_classifier(model: nn.Module, width: int) -> None:
    """Takes 4096 features out of alexnet and vgg16: 100 million weights that test nothing."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and 4096 in (layer.in_features, layer.out_features):
            before, after = layer.in_features, layer.out_features
            before, after = (width if n == 4096 else n for n in (before, after))
            model.set_submodule(name, nn.Linear(before, after))


def _bert(layers: int, hidden_size: int = 768) -> Callable[[], nn.Module]:
    def build() -> Any:
        transformers = import_transformers()
        config = transformers.BertConfig(
            num_hidden_layers=layers,
            hidden_size=hidden_size,
            num_attention_heads=hidden_size // 64,
            intermediate_size=4 * hidden_size,
        )
        return transformers.BertModel(config)

    return build


def _vit_small(size: int, layers: int) -> Callable[[], nn.Module]:
    def build() -> Any:
        return import_torchvision().models.VisionTransformer(
            image_size=size,
            patch_size=16,
            num_layers=layers,
            num_heads=6,
            hidden_dim=384,
            mlp_dim=1536,
        )

    return build
