"""Requests of changing sizes, as services and training loops see them, and their suites."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dynamo_backends.bench.suites.case import Scale, call
from dynamo_backends.bench.suites.generators import ARCHITECTURES, generate
from dynamo_backends.bench.suites.unet import UNet
from dynamo_backends.bench.suites.weights import randomize_weights
from dynamo_backends.bench.torchvision_shim import import_torchvision, import_transformers

Inputs = tuple[Any, ...]
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Stream:
    """A model and what it is asked.

    Attributes:
        name: Name of the stream.
        summary: In a few words.
        model: Reproducible, in eval mode.
        serve: Given the model and a way of compiling a function: answers a request.
        requests: Their inputs, in order.
        trains: Whether requests are training steps.
        tokens: Whether answers are whole numbers that rounding can change: they are right if they
            are eager's in float64.
    """

    name: str
    summary: str
    model: nn.Module
    serve: Callable[[nn.Module, Compile], Callable[..., Any]]
    requests: list[Inputs]
    trains: bool = False
    tokens: bool = False


def _whole(model: nn.Module, compiled: Compile) -> Callable[..., Any]:
    return compiled(model)


def embeddings(scale: Scale = "bench", count: int = 300) -> Stream:
    """An embedding server: mean pooling over MiniLM's architecture (6 layers of 384 features).

    Batches of 1 to 8 texts of 5 to 128 tokens; the longest of a batch has no padding.
    """
    transformers = import_transformers()
    layers, features = (6, 384) if scale == "bench" else (2, 32)
    config = transformers.BertConfig(
        vocab_size=30522 if scale == "bench" else 100, hidden_size=features,
        num_hidden_layers=layers, num_attention_heads=features // 32 or 1,
        intermediate_size=4 * features,
    )  # fmt: skip

    class Embedder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = transformers.BertModel(config, add_pooling_layer=False)

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            states = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
            weights = mask[..., None].to(states.dtype)
            mean = (states * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
            return nn.functional.normalize(mean, dim=-1)

    def requests() -> Iterator[Inputs]:
        for _ in range(count):
            yield _texts(random.randint(1, 8), random.randint(5, 128), config.vocab_size)

    model, asked = _seeded(Embedder, requests)
    text = f"{count} requests, batch 1-8, 5-128 tokens"
    return Stream("embeddings", text, model, _whole, asked)


def _texts(batch: int, length: int, words: int) -> Inputs:
    ids = torch.randint(0, words, (batch, length))
    lengths = torch.randint(max(1, length // 2), length + 1, (batch,))
    lengths[0] = length
    return ids, (torch.arange(length) < lengths[:, None]).long()


def images(scale: Scale = "bench", count: int = 100) -> Stream:
    """ResNet-18 and a U-Net in turn: batches of 1 to 16 images of three resolutions."""
    torchvision = import_torchvision()
    sides = (96, 128, 160) if scale == "bench" else (32, 48, 64)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = torchvision.models.resnet18()
            self.segmenter = UNet(16, 3) if scale == "bench" else UNet(4, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.classifier(x), self.segmenter(x)

    def requests() -> Iterator[Inputs]:
        for _ in range(count):
            side = random.choice(sides)
            yield (torch.randn(random.randint(1, 16), 3, side, side),)

    model, asked = _seeded(Both, requests)
    text = f"{count} requests, batch 1-16, sides of {', '.join(map(str, sides))}"
    return Stream("images", text, model, _whole, asked)


def prompts(scale: Scale = "bench", count: int = 10) -> Stream:
    """Generation with a static cache: prompts of 8 to 200 tokens, 32 new ones each."""
    transformers = import_transformers()
    layers, features = (4, 256) if scale == "bench" else (2, 32)
    new = 32 if scale == "bench" else 4
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=features, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=2 * features, bos_token_id=0, eos_token_id=None,
        pad_token_id=0, max_position_embeddings=512,
    )  # fmt: skip

    def serve(model: nn.Module, compiled: Compile) -> Callable[..., Any]:
        generator: Any = model
        forward = compiled(model.forward)

        def answer(ids: Tensor) -> Any:
            generator.forward = forward
            return generator.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False,
                cache_implementation="static", disable_compile=True,
            )  # fmt: skip

        return answer

    def requests() -> Iterator[Inputs]:
        for _ in range(count):
            yield (torch.randint(1, 512, (1, random.randint(8, 200))),)

    model, asked = _seeded(lambda: transformers.LlamaForCausalLM(config), requests)
    text = f"{count} prompts of 8-200 tokens, {new} new"
    return Stream("prompts", text, model, serve, asked, tokens=True)


def training(scale: Scale = "bench", count: int = 60) -> Stream:
    """Gradients of a text classifier: lengths of 16 to 128, and every tenth batch is smaller."""
    features = 128 if scale == "bench" else 32

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(1000, features)
            layer = nn.TransformerEncoderLayer(
                features, 4, 4 * features, dropout=0.0, batch_first=True
            )
            self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
            self.head = nn.Linear(features, 5)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.encoder(self.embedding(ids)).mean(1))

    def serve(model: nn.Module, compiled: Compile) -> Callable[..., Any]:
        model.train()
        parameters = list(model.parameters())
        loss_of = compiled(lambda ids, y: nn.functional.cross_entropy(model(ids), y))

        def step(ids: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
            loss = loss_of(ids, labels)
            return (loss.detach(), *torch.autograd.grad(loss, parameters))

        return step

    def requests() -> Iterator[Inputs]:
        for i in range(count):
            batch = random.randint(3, 15) if i % 10 == 9 else 16
            length = random.randint(16, 128)
            yield torch.randint(0, 1000, (batch, length)), torch.randint(0, 5, (batch,))

    model, asked = _seeded(Classifier, requests)
    text = f"{count} steps, batch 16 and a smaller last one, lengths 16-128"
    return Stream("training", text, model, serve, asked, trains=True)


def audio(scale: Scale = "bench", count: int = 60) -> Stream:
    """Returns an encoder as Whisper's (two convolutions, attention) on 1 to 10 s of spectrogram."""
    features, layers = (256, 4) if scale == "bench" else (32, 2)

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv1d(80, features, 3, padding=1)
            self.second = nn.Conv1d(features, features, 3, stride=2, padding=1)
            self.positions = nn.Parameter(torch.randn(600, features) / 10)
            layer = nn.TransformerEncoderLayer(
                features, 4, 4 * features, 0.0, "gelu", batch_first=True, norm_first=True
            )
            self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

        def forward(self, mel: Tensor) -> Tensor:
            x = nn.functional.gelu(self.first(mel))
            x = nn.functional.gelu(self.second(x)).transpose(1, 2)
            return self.encoder(x + self.positions[: x.shape[1]])

    def requests() -> Iterator[Inputs]:
        for _ in range(count):
            yield (torch.randn(1, 80, random.randint(100, 1000)),)

    model, asked = _seeded(Encoder, requests)
    return Stream("audio", f"{count} clips of 1-10 s", model, _whole, asked)


STREAMS: dict[str, Callable[..., Stream]] = {
    "embeddings": embeddings,
    "images": images,
    "prompts": prompts,
    "training": training,
    "audio": audio,
}


def _seeded(
    build: Callable[[], nn.Module], requests: Callable[[], Iterator[Inputs]]
) -> tuple[nn.Module, list[Inputs]]:
    """Returns a model and requests, the same in every process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        random.seed(0)
        model = build().eval()
        asked = list(requests())
        randomize_weights(model, lambda: call(model, asked[0]))
    return model, asked


_COUNTS = {"embeddings": 60, "images": 24, "prompts": 5, "training": 30, "audio": 24}
"""Requests of each stream: a round has all of them."""

_LENGTHS = (20, 29, 25, 17)  # of prompts, all in one bucket: one compilation is for all
_LAYERS, _FEATURES, _TOKENS = 2, 64, 32
_TEST_COUNT, _TEST_TOKENS = 4, 4


@dataclass(frozen=True)
class StreamCase:
    """One stream of a suite.

    Attributes:
        name: Unique within its suite.
        make: Makes the stream, the same in every process.
        mode: The mode of `bench.cells` that it is for.
    """

    name: str
    make: Callable[[], Stream]
    mode: str = "inference"


def traffic(scale: Scale) -> list[StreamCase]:
    """Streams of changing sizes, shorter than those of benchmarks/traffic.py."""
    counts = _COUNTS if scale == "bench" else dict.fromkeys(_COUNTS, _TEST_COUNT)
    return [
        StreamCase(name, _stream(name, scale, count), _mode(name)) for name, count in counts.items()
    ]


def generation(scale: Scale) -> list[StreamCase]:
    """`generate` with static caches, where an architecture has them."""
    return [StreamCase(name, _generating(name, scale)) for name in ARCHITECTURES]


def _mode(name: str) -> str:
    return "training" if name == "training" else "inference"


def _stream(name: str, scale: Scale, count: int) -> Callable[[], Stream]:
    return lambda: STREAMS[name](scale, count=count)


def _generating(name: str, scale: Scale) -> Callable[[], Stream]:
    architecture = ARCHITECTURES[name]
    cache = architecture.caches[0]
    bench = scale == "bench"
    size = (_LAYERS, _FEATURES) if bench else (1, _FEATURES // 2)
    tokens = _TOKENS if bench else _TEST_TOKENS

    def serve(model: nn.Module, compiled: Compile) -> Callable[..., Any]:
        forward = compiled(model.forward)

        def answer(prompt: Any) -> Any:
            model.forward = forward
            return generate(model, prompt, tokens, cache)

        return answer

    def make() -> Stream:
        model = architecture.make(*size)
        asked = [(prompt,) for prompt in architecture.prompts(model, _LENGTHS)]
        text = f"{len(asked)} prompts of 17-29 tokens, {tokens} new, {cache} cache"
        return Stream(name, text, model, serve, asked, tokens=True)

    return make
