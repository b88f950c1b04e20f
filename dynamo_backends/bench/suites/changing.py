"""Suites of requests instead of single calls: changing sizes, and generation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from dynamo_backends.bench.suites.case import Scale
from dynamo_backends.bench.suites.generators import ARCHITECTURES, generate
from dynamo_backends.bench.suites.streams import STREAMS, Compile, Stream

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
