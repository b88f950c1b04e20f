"""The suites by name."""

import difflib
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from dynamo_backends.bench.suites.case import ModelCase, Scale, tokens
from dynamo_backends.bench.suites.classic import classic
from dynamo_backends.bench.suites.control_flow import control_flow, recurrent
from dynamo_backends.bench.suites.transformers import transformers
from dynamo_backends.bench.suites.unet import unet
from dynamo_backends.bench.torchvision_shim import import_transformers


def full_size(scale: Scale = "bench", batch: int = 4) -> list[ModelCase]:
    """Returns the suite of models in their published sizes.

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


def gpu(scale: Scale = "bench", batch: int = 4) -> list[ModelCase]:
    """Returns the models that are measured on GPUs: the classic ones and GPT-2."""
    return [*classic(scale, batch), *find_cases(transformers(scale, batch), ["gpt2"])]


class _HasName(Protocol):
    @property
    def name(self) -> str: ...


Named = TypeVar("Named", bound=_HasName)

SUITES: dict[str, Callable[[Scale, int], list[ModelCase]]] = {
    "classic": classic,
    "transformers": transformers,
    "recurrent": recurrent,
    "unet": unet,
    "control_flow": control_flow,
    "full_size": full_size,
}
"""Name to a function of scale and batch size. Listing a suite imports no model library."""


def suite(name: str, scale: Scale = "bench", batch: int = 4) -> list[ModelCase]:
    """Returns the models of a suite.

    Args:
        name: A key of `SUITES`.
        scale: "bench" for sizes as published, "test" for small ones.
        batch: Examples per call.

    Raises:
        ValueError: There is no such suite.
    """
    if name not in SUITES:
        raise ValueError(f"unknown suite {name!r}; there are: {', '.join(SUITES)}")
    return SUITES[name](scale, batch)


def find_case(name: str, model: str, scale: Scale = "bench", batch: int = 4) -> ModelCase:
    """Returns a model of a suite; see `suite` and `find_cases`."""
    return find_cases(suite(name, scale, batch), [model])[0]


def find_cases(cases: Iterable[Named], names: Iterable[str]) -> list[Named]:
    """Returns the named models, in the order of the names.

    Raises:
        ValueError: A name is not among the models; the message has the nearest one.
    """
    known = {case.name: case for case in cases}
    found = []
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"unknown model {name!r}.{hint} There are: {', '.join(known)}")
        found.append(known[name])
    return found
