"""Generation with transformers: the same tokens as eager, what is compiled, tokens per second.

    python benchmarks/generation.py
    python benchmarks/generation.py --models llama t5 --backends openxla --caches static

Each cell (model, backend, cache) is a process of its own. In float64 it generates tokens greedily
for two prompts of different lengths in the same bucket, which have to be eager's; what is compiled
for the second one is counted. In float32 it is timed: tokens per second of a third prompt, eager
and compiled one after the other, medians of `--rounds`.

`--speed` measures one model instead, Llama-like (35 million parameters): tokens per second of each
backend, a single decoding step, and how long it takes to read the weights once, by a matrix-vector
product of torch's with as many bytes. `--length` is the length of its static cache.
"""

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.progress import track
from rich.table import Table

import dynamo_backends
import harness
from dynamo_backends import _torch_private as private
from harness.generators import ARCHITECTURES, Prompt, generate

BACKENDS = ("inductor", "openxla", "onnxrt", "ov", "inductor_freezing")
LENGTHS = (20, 29, 25)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if tokens were wrong or something was compiled too late."""
    settings = parse(arguments)
    if settings.child:
        return speed_child(settings) if settings.speed else cell_child(settings)
    console = harness.make_console()
    console.print(f"[dim]{harness.environment_line()}[/]")
    if settings.speed:
        cells = [("llama", b, "static") for b in settings.backends]
    else:
        cells = [
            (model, backend, cache)
            for model in settings.models
            for cache in ARCHITECTURES[model].caches
            if cache in settings.caches
            for backend in settings.backends
        ]
    rows = [in_a_process(settings, *c) for c in track(cells, console=console, transient=True)]
    console.print(speed_table(rows) if settings.speed else cells_table(rows))
    if settings.json:
        harness.save_json(settings.json, "generation", rows, settings=vars(settings))
    return 1 if any("error" in r or r.get("wrong") or r.get("late") for r in rows) else 0


def in_a_process(settings: argparse.Namespace, *cell: str) -> dict[str, Any]:
    """One cell in a fresh process with fresh cache folders."""
    numbers = {
        k: getattr(settings, k) for k in ("layers", "features", "tokens", "rounds", "length")
    }
    with tempfile.TemporaryDirectory() as folder:
        caches = {
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "DYNAMO_BACKENDS_CACHE": f"{folder}/dynamo_backends",
        }
        command = [__file__, "--child", *cell, *(["--speed"] if settings.speed else [])]
        command += [str(x) for k, v in numbers.items() for x in (f"--{k}", v)]
        try:
            found = harness.run_child(command, caches, timeout_s=settings.timeout)
        except harness.ChildError as error:
            found = {"error": str(error).splitlines()[-1]}
    return dict(zip(("model", "backend", "cache"), cell, strict=True)) | found


def compiled_model(model: Any, backend: str) -> Any:
    """A copy of a model whose forward is compiled."""
    model = copy.deepcopy(model)
    model.forward = torch.compile(model.forward, backend=backend)
    return model


def cell_child(settings: argparse.Namespace) -> int:
    """Checks and times one cell."""
    name, backend, cache = settings.child
    architecture = ARCHITECTURES[name]
    model = architecture.make(settings.layers, settings.features)
    prompts = architecture.prompts(model, LENGTHS)
    wrong, late = check(model.double(), backend, cache, prompts[:2], settings.tokens)
    model = architecture.make(settings.layers, settings.features)
    torch.compiler.reset()
    compiled = compiled_model(model, backend)
    runs = {
        "eager": lambda: generate(model, prompts[2], settings.tokens, cache),
        "compiled": lambda: generate(compiled, prompts[2], settings.tokens, cache),
    }
    seconds = timed(runs, settings.rounds)
    harness.hand_back(
        wrong=wrong, late=late, **{k: settings.tokens / s for k, s in seconds.items()}
    )
    return 0


def check(
    model: Any, backend: str, cache: str, prompts: Sequence[Prompt], tokens: int
) -> tuple[int, int]:
    """How many tokens are not eager's, and what was compiled after the first prompt.

    Counted are graphs that Dynamo captured and executables of this package.
    """
    compiled = compiled_model(model, backend)
    wrong, counts = 0, []
    with dynamo_backends.record() as reports:
        for prompt in prompts:
            expected, given = (_floats(prompt, torch.float64) for _ in range(2))
            found = generate(compiled, given, tokens, cache)
            wrong += int((found != generate(model, expected, tokens, cache)).sum())
            graphs = private.dynamo_counters()["stats"]["unique_graphs"]
            counts.append(graphs + sum(r.executables for r in reports))
    return wrong, counts[-1] - counts[0]


def _floats(prompt: Prompt, dtype: torch.dtype) -> Prompt:
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in prompt.items()}


def timed(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Medians of seconds; the runs take turns, after one of each."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(s) for name, s in seconds.items()}


def speed_child(settings: argparse.Namespace) -> int:
    """Times the larger model with one backend."""
    architecture = ARCHITECTURES["llama"]
    model = architecture.make(8, 512)
    (prompt,) = architecture.prompts(model, (32,))
    backend = settings.child[1]
    compiled = model if backend == "eager" else compiled_model(model, backend)
    how = {"max_cache_len": settings.length} if settings.length else {}
    step = Step(compiled, settings.length or 32 + settings.tokens)
    weights = sum(p.numel() for p in model.parameters()) - model.model.embed_tokens.weight.numel()
    matrix, vector = torch.randn(weights // 4096, 4096), torch.randn(4096)
    seconds = timed(
        {
            "generate": lambda: generate(compiled, prompt, settings.tokens, "static", **how),
            "step": step,
            "stream": lambda: [torch.mv(matrix, vector) for _ in range(8)],
        },
        settings.rounds,
    )
    harness.hand_back(
        tokens=settings.tokens / seconds["generate"],
        step_ms=seconds["step"] / step.repeat * 1e3,
        stream_ms=seconds["stream"] / 8 * 1e3,
        megabytes=weights * 4 / 1e6,
        cache_megabytes=step.bytes / 1e6,
    )
    return 0


class Step:
    """Decoding steps without `generate` around them.

    Args:
        model: Whose forward is compiled.
        length: Of the static cache.

    Attributes:
        repeat: How many steps a call makes.
        bytes: Of the cache.
    """

    repeat = 16

    def __init__(self, model: Any, length: int):
        from transformers import StaticCache

        self._model = model
        self._cache = StaticCache(config=model.config, max_cache_len=length)
        config = model.config
        heads, size = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
        self._cache.early_initialization(1, heads, size, torch.float32, torch.device("cpu"))
        self._mask = torch.zeros(1, 1, 1, length)
        self._token = torch.ones(1, 1, dtype=torch.int64)
        self.bytes = sum(x.keys.nbytes + x.values.nbytes for x in self._cache.layers)

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


def cells_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The cells for people."""
    table = Table("model", "cache", "backend", "wrong", "compiled late", "eager", "tokens/s", "×")
    for r in rows:
        name = [r["model"], r["cache"], r["backend"]]
        if "error" in r:
            table.add_row(*name, r["error"])
            continue
        speed = [f"{r['eager']:.0f}", f"{r['compiled']:.0f}", f"{r['compiled'] / r['eager']:.2f}"]
        table.add_row(*name, str(r["wrong"]), str(r["late"]), *speed)
    return table


def speed_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The larger model for people."""
    table = Table("backend", "tokens/s", "step ms", "weights once ms", "MB", "cache MB")
    for r in rows:
        if "error" in r:
            table.add_row(r["backend"], r["error"])
            continue
        numbers = ("tokens", "step_ms", "stream_ms", "megabytes", "cache_megabytes")
        table.add_row(r["backend"], *(f"{r[k]:.1f}" for k in numbers))
    return table


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = harness.arguments(__doc__, rounds=3)
    parser.add_argument("--models", nargs="+", default=list(ARCHITECTURES), choices=ARCHITECTURES)
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), metavar="BACKEND")
    parser.add_argument("--caches", nargs="+", default=["static", "default"], metavar="CACHE")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="so many are generated")
    parser.add_argument("--speed", action="store_true", help="the larger model")
    parser.add_argument("--length", type=int, default=0, help="of its cache; 0: what is needed")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one cell")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
