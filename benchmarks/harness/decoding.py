"""What generation with compiled models is checked and measured by."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import dynamo_backends
from dynamo_backends import _torch_private as private
from dynamo_backends.bench.statistics import time_candidates
from dynamo_backends.bench.suites.generators import ARCHITECTURES, Prompt, generate
from dynamo_backends.pipeline import background

LENGTHS = (20, 29, 25)
"""Of prompts, all in one bucket."""

DTYPES = {"ov": torch.float32}
"""What is checked of backends that leave float64 to eager."""


def compiled_model(model: Any, backend: Any) -> Any:
    """A copy of a model whose forward is compiled; of "eager", which is not."""
    model = copy.deepcopy(model)
    if backend != "eager":
        model.forward = torch.compile(model.forward, backend=backend)
    return model


def timed(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Medians of seconds; the runs take turns, after one of each."""
    timings = time_candidates(runs, rounds, warmup=1, lead_in=0, pause_s=0.0)
    return {name: timing.median for name, timing in timings.items()}


class Copies(TorchDispatchMode):
    """Counts tensors of at least so many elements that torch makes or writes."""

    def __init__(self, elements: int):
        super().__init__()
        self._elements = elements
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        written = [] if func.is_view else _written(func, args, result)
        self.count += sum(isinstance(t, Tensor) and t.numel() >= self._elements for t in written)
        return result


def _written(func: Any, args: Sequence[Any], result: Any) -> list[Any]:
    if func is torch.ops.aten.index_put_.default:  # of the whole, it writes what it is given
        return [args[2]]
    marks = [argument.alias_info for argument in func._schema.arguments]
    changed = [a for a, mark in zip(args, marks, strict=False) if mark and mark.is_write]
    return pytree.tree_leaves(changed or result)


class Watched:
    """A backend whose graphs run under a dispatch mode, if one is set."""

    def __init__(self, name: str):
        self._backend = private.lookup_backend(name)
        self.mode: TorchDispatchMode | None = None

    def __call__(self, gm: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        function = self._backend(gm, inputs)

        def call(*args: Any) -> Any:
            if self.mode is None:
                return function(*args)
            with self.mode:
                return function(*args)

        return call

    @contextmanager
    def copies(self, elements: int) -> Iterator[Copies]:
        """Counts as `Copies` does in the graphs that are called meanwhile."""
        self.mode = counting = Copies(elements)
        try:
            yield counting
        finally:
            self.mode = None


def check(
    model: Any, backend: str, cache: str, prompts: Sequence[Prompt], tokens: int
) -> dict[str, int]:
    """What is not as it should be, when tokens are generated for prompts in one bucket.

    Returns:
        "wrong": tokens that are not eager's in the model's dtype; "late": graphs that Dynamo
        captured and executables of this package that were made after the first prompt; "in_eager":
        operators, of all graphs.
    """
    compiled = compiled_model(model, backend)
    dtype = next(model.parameters()).dtype
    wrong, counts = 0, []
    with dynamo_backends.record() as reports:
        for prompt in prompts:
            expected, given = (_floats(prompt, dtype) for _ in range(2))
            found = generate(compiled, given, tokens, cache)
            wrong += int((found != generate(model, expected, tokens, cache)).sum())
            background.wait_until_idle(600)
            graphs = private.dynamo_counters()["stats"]["unique_graphs"]
            counts.append(graphs + sum(r.executables for r in reports))
    in_eager = sum(r.ops_in_eager for r in reports)
    return {"wrong": wrong, "late": counts[-1] - counts[0], "in_eager": in_eager}


def _floats(prompt: Prompt, dtype: torch.dtype) -> Prompt:
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in prompt.items()}


def check_and_time(
    name: str, backend: str, cache: str, size: tuple[int, int], tokens: int, rounds: int
) -> dict[str, Any]:
    """What `check` says of an architecture, and tokens per second in float32, eager's beside.

    `size` is layers and features; without rounds generation is not timed.
    """
    architecture = ARCHITECTURES[name]
    model = architecture.make(*size)
    prompts = architecture.prompts(model, LENGTHS)
    exact = model.to(DTYPES.get(backend, torch.float64))
    found: dict[str, Any] = check(exact, backend, cache, prompts, tokens)
    if not rounds:
        return found
    model = architecture.make(*size)
    torch.compiler.reset()
    compiled = compiled_model(model, backend)
    seconds = timed(
        {
            "eager": lambda: generate(model, prompts[2], tokens, cache),
            "compiled": lambda: generate(compiled, prompts[2], tokens, cache),
        },
        rounds,
    )
    return found | {k: tokens / s for k, s in seconds.items()}


class Step:
    """Decoding steps of a Llama without `generate` around them.

    Args:
        model: Whose forward is compiled.
        length: Of the static cache, which has `bytes`, and `elements` in one layer's keys.
    """

    repeat = 16  # steps that a call makes

    def __init__(self, model: Any, length: int):
        from transformers import StaticCache

        self._model = model
        config = model.config
        self._cache: Any = StaticCache(config=config, max_cache_len=length)
        heads, size = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
        self._cache.early_initialization(1, heads, size, torch.float32, torch.device("cpu"))
        self._mask = torch.zeros(1, 1, 1, length)
        self._token = torch.ones(1, 1, dtype=torch.int64)
        self.bytes = sum(x.keys.nbytes + x.values.nbytes for x in self._cache.layers)
        self.elements = self._cache.layers[0].keys.numel()

    def share(self) -> None:
        """Has the cache seen by others, so that it can only be updated by copying it."""
        self._seen = [t.detach() for x in self._cache.layers for t in (x.keys, x.values)]

    @torch.no_grad()
    def __call__(self) -> None:
        """Makes some steps, each at the same position."""
        place = torch.zeros(1, 1, dtype=torch.int64)
        for _ in range(self.repeat):
            for layer in self._cache.layers:
                layer.cumulative_length.zero_()
            self._model.forward(
                self._token, attention_mask=self._mask, position_ids=place,
                past_key_values=self._cache,
            )  # fmt: skip


COPYING = "@copying"
"""After a backend's name: the cache is seen by others, so that it is copied at each step."""


def speed(
    column: str, size: tuple[int, int], tokens: int, rounds: int, length: int
) -> dict[str, Any]:
    """A Llama's speed, and that of reading its weights once, in milliseconds and tokens per second.

    Args:
        column: Name of a backend, or "eager"; `COPYING` after it.
        size: Layers and features.
        tokens: How many are generated.
        rounds: Samples of each.
        length: Of the static cache.
    """
    name, copying, _ = column.partition(COPYING)
    architecture = ARCHITECTURES["llama"]
    model = architecture.make(*size)
    (prompt,) = architecture.prompts(model, (32,))
    backend = None if name == "eager" else Watched(name)
    compiled = compiled_model(model, backend or "eager")
    step = Step(compiled, length)
    if copying:
        step.share()
    read, weights = _streaming(model)
    runs: dict[str, Callable[[], Any]] = {"step": step, "stream": read}
    if not copying:
        how = {"max_cache_len": length}
        runs["generate"] = lambda: generate(compiled, prompt, tokens, "static", **how)
    with dynamo_backends.record() as reports:
        seconds = timed(runs, rounds)
    copies = None
    if backend is not None:
        with backend.copies(step.elements) as counting:
            step()
        copies = counting.count / step.repeat
    return {
        "tokens": tokens / seconds["generate"] if not copying else None,
        "step_ms": seconds["step"] / step.repeat * 1e3,
        "stream_ms": seconds["stream"] / 8 * 1e3,
        "megabytes": weights * 4 / 1e6,
        "cache_megabytes": step.bytes / 1e6,
        "copies": copies,
        **_statistics(reports),
    }


def _streaming(model: Any) -> tuple[Callable[[], Any], int]:
    """What reads as many bytes as a model's weights 8 times; and how many weights there are."""
    weights = sum(p.numel() for p in model.parameters()) - model.model.embed_tokens.weight.numel()
    width = min(4096, weights)
    matrix, vector = torch.randn(weights // width, width), torch.randn(width)
    return lambda: [torch.mv(matrix, vector) for _ in range(8)], weights


def _statistics(reports: Sequence[Any]) -> dict[str, float]:
    """Megabytes of XLA's memory in the program that decodes: donated inputs, and temporaries."""
    programs = [getattr(r.executable, "static_program", None) for r in reports]
    blocks = [b for p in programs if p is not None for b in p.blocks]
    mains = [main for b in blocks if (main := getattr(b.executable, "main", None)) is not None]
    named = "get_compiled_memory_stats"
    found = [getattr(main, named)() for main in mains if hasattr(main, named)]
    if not found:
        return {}
    decoding = min(found, key=lambda s: s.temp_size_in_bytes)
    return {
        "donated_megabytes": decoding.alias_size_in_bytes / 1e6,
        "temporary_megabytes": decoding.temp_size_in_bytes / 1e6,
    }
