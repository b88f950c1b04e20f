"""What programs for CPUs lose without XLA's algebraic simplifier: speed and memory.

    python benchmarks/xla_simplifier.py
    python benchmarks/xla_simplifier.py --models convnext_tiny bert --rounds 40
    python benchmarks/xla_simplifier.py --parts steps generation

`openxla` compiles without the simplifier, which computes `(x + c) - c` as `x`. Each model is
compiled as it is now and with the simplifier in one process, and both programs are timed
interleaved. A ratio is the fastest time with the simplifier over the fastest without it: above 1,
what is done now is faster. Memory is what the largest program takes while it runs (arguments,
results and temporaries as XLA states them), without the simplifier over with it; temporaries alone
are shown, too. Inference is of the classic suite and of three models more, training steps are those
of `compile_step` with AdamW, generation is 16 decoding steps of a Llama with a static cache.

The exit status is 1 if the geometric mean of a part is below 0.99, a ratio below 0.97, or a program
takes over 5% more memory.
"""

import argparse
import contextlib
import copy
import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
from rich.table import Table

import dynamo_backends
import harness
from dynamo_backends.bench.suites.case import call, image
from dynamo_backends.bench.suites.generators import ARCHITECTURES
from dynamo_backends.xla import _jaxlib
from dynamo_backends.xla.lowering import interpreter
from harness import decoding

PARTS = ("inference", "steps", "generation")
FURTHER = ("convnext_tiny", "regnet_y_800mf", "densenet121")
"""Models of torchvision that the simplifier did most for, among those that were tried."""

STEPS = ("resnet18", "mobilenet_v2", "bert")
GENERATION = {"bench": (8, 512, 256), "test": (1, 64, 64)}  # layers, features, length of the cache
NOW, BEFORE = "without", "with"
MEAN, EACH, MEMORY = 0.99, 0.97, 1.05

Run = Callable[[], Any]


@dataclass
class Row:
    """One model.

    Attributes:
        part: One of `PARTS`.
        name: The model.
        milliseconds: Fastest, without the simplifier and with it.
        bytes: Of the largest program while it runs, likewise.
        temporary_bytes: Of these, what is neither an argument nor a result.
    """

    part: str
    name: str
    milliseconds: tuple[float, float]
    bytes: tuple[int, int]
    temporary_bytes: tuple[int, int]

    @property
    def ratio(self) -> float:
        """How fast the program without the simplifier is, relative to the other."""
        return self.milliseconds[1] / self.milliseconds[0]

    @property
    def memory(self) -> float:
        """How much memory it takes, relative to the other."""
        return self.bytes[0] / self.bytes[1] if self.bytes[1] else 1.0

    @property
    def temporaries(self) -> float:
        """The same of temporaries."""
        now, before = self.temporary_bytes
        return now / before if before else 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if a limit is not met."""
    settings = parse(arguments)
    console = harness.announce()
    rows = []
    for part in settings.parts:
        for name, make in _subjects(part, settings).items():
            row = measure(part, name, make, settings.rounds, settings.processor_time)
            rows.append(row)
            times = " / ".join(f"{ms:.2f}" for ms in row.milliseconds)
            console.print(f"[dim]{part} {name}: {times} ms, {row.ratio:.3f}[/]", highlight=False)
            torch.compiler.reset()
            gc.collect()
    console.print(table(rows))
    if settings.json:
        harness.save_json(settings.json, "simplifier", [asdict(row) for row in rows])
    for text in (missed := misses(rows)):
        console.print(f"[red]{text}[/]")
    return int(bool(missed))


def measure(
    part: str, name: str, make: Callable[[], Run], rounds: int, processor_time: bool = False
) -> Row:
    """Compiles a model twice and times both programs.

    Args:
        part: One of `PARTS`.
        name: Of the model.
        make: Compiles it anew at each call, with the passes that are disabled at the moment.
        rounds: Samples of each.
        processor_time: Of all threads, in the place of the time that passes.
    """
    runs: dict[str, Run] = {}
    memory: dict[str, tuple[int, int]] = {}
    for way, passes in ((NOW, _jaxlib.CPU_DISABLED_PASSES), (BEFORE, ())):
        torch.compiler.reset()
        with (
            mock.patch.object(_jaxlib, "CPU_DISABLED_PASSES", passes),
            mock.patch.object(interpreter, "find_barrier_nodes", return_value=frozenset()),
            _statistics() as found,
        ):
            runs[way] = make()
            for _ in range(2):  # steps are compiled at their second call
                runs[way]()
        if not found:
            raise RuntimeError(f"{part} {name}: nothing was compiled")
        memory[way] = max(found)
    clock = time.process_time if processor_time else time.perf_counter
    timings = harness.time_candidates(runs, rounds, baseline=BEFORE, clock=clock)
    fastest = {way: min(timing.samples) * 1e3 for way, timing in timings.items()}
    total, temporaries = zip(memory[NOW], memory[BEFORE], strict=True)
    return Row(part, name, (fastest[NOW], fastest[BEFORE]), total, temporaries)


@contextlib.contextmanager
def _statistics() -> Iterator[list[tuple[int, int]]]:
    """Bytes of each program that is compiled meanwhile: all, and those of temporaries."""
    found: list[tuple[int, int]] = []
    compile_with = _jaxlib._compile

    def watched(*args: Any) -> Any:
        executable = compile_with(*args)
        stats = executable.get_compiled_memory_stats()
        held = stats.argument_size_in_bytes + stats.output_size_in_bytes
        held -= stats.alias_size_in_bytes
        found.append((held + stats.temp_size_in_bytes, stats.temp_size_in_bytes))
        return executable

    with mock.patch.object(_jaxlib, "_compile", watched):
        yield found


def _subjects(part: str, settings: argparse.Namespace) -> dict[str, Callable[[], Run]]:
    if part == "generation":
        layers, features, length = GENERATION[settings.scale]
        return {"llama": lambda: _decoding((layers, features), length)}
    cases = harness.suite("classic", settings.scale, settings.batch)
    if part == "inference":
        cases = [*cases, *map(_further(settings), FURTHER)]
    names = settings.models or (STEPS if part == "steps" else [case.name for case in cases])
    make = _step if part == "steps" else _inference
    return {c.name: lambda c=c: make(c) for c in cases if c.name in names}  # type: ignore[misc]


def _further(settings: argparse.Namespace) -> Callable[[str], harness.ModelCase]:
    size = 224 if settings.scale == "bench" else 64
    models = harness.import_torchvision().models
    return lambda name: harness.ModelCase(
        name,
        lambda: models.get_model(name, weights=None),
        image(settings.batch, size),
        frozenset({"conv"}),
    )


def _inference(case: harness.ModelCase) -> Run:
    model, inputs = case.make(), case.inputs()
    compiled = torch.compile(model, backend="openxla", options={"cache": False})

    def run() -> Any:
        with torch.no_grad():
            return call(compiled, inputs)

    return run


def _step(case: harness.ModelCase) -> Run:
    model, batch = case.make().train(), case.inputs()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step() -> torch.Tensor:
        outputs = torch.utils._pytree.tree_leaves(call(model, batch))
        loss = sum(x.square().mean() for x in outputs if isinstance(x, torch.Tensor))
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return dynamo_backends.compile_step(
        step, model=model, optimizer=optimizer, backend="openxla", options={"cache": False}
    )


def _decoding(size: tuple[int, int], length: int) -> Run:
    model = copy.deepcopy(ARCHITECTURES["llama"].make(*size))
    compiler = dynamo_backends.compiler("openxla", cache=False)
    model.forward = torch.compile(model.forward, backend=compiler)
    return decoding.Step(model, length)


def table(rows: Sequence[Row]) -> Table:
    """All rows, and the geometric mean of each part."""
    found = Table("part", "model", "without ms", "with ms", "speed", "memory", "temporaries")
    for part in dict.fromkeys(row.part for row in rows):
        some = [row for row in rows if row.part == part]
        for row in some:
            times = (f"{ms:.2f}" for ms in row.milliseconds)
            found.add_row(
                part,
                row.name,
                *times,
                f"{row.ratio:.3f}",
                f"{row.memory:.3f}",
                f"{row.temporaries:.3f}",
            )
        mean = harness.geometric_mean([row.ratio for row in some])
        found.add_row(part, "geometric mean", "", "", f"{mean:.3f}", "", "", end_section=True)
    return found


def published(content: Mapping[str, Any]) -> list[Table | str]:
    """What a file of results says, for a page."""
    return [table([Row(**row) for row in content["results"]])]


def misses(rows: Sequence[Row]) -> list[str]:
    """Which limits are not met, in words."""
    found = []
    for part in dict.fromkeys(row.part for row in rows):
        mean = harness.geometric_mean([row.ratio for row in rows if row.part == part])
        if mean < MEAN:
            found.append(f"{part}: the geometric mean is {mean:.3f}, less than {MEAN}")
    for row in rows:
        if row.ratio < EACH:
            found.append(f"{row.part} {row.name}: {row.ratio:.3f} of the speed, less than {EACH}")
        if row.memory > MEMORY:
            found.append(f"{row.part} {row.name}: {row.memory:.2f} of the memory, over {MEMORY}")
    return found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = harness.model_arguments(__doc__, rounds=25)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="the processor time of all threads, which other processes disturb less",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
