"""autotune with `precision="int8"` against eager and the best float32 candidate.

Three models: the sentence encoder of the demo, with trained weights, on lines of poems; ResNet-50
on parts of two photographs; BERT on random tokens. What is measured on is held out of calibration
altogether: the demo's sentences, the whole photographs, other tokens.
"""

import dataclasses
import importlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dynamo_backends.bench.statistics import time_candidates
from dynamo_backends.bench.suites import find_case
from dynamo_backends.bench.suites.case import Scale, call
from dynamo_backends.capture.rendering import candidates_table
from dynamo_backends.int8.options import saturates
from dynamo_backends.int8.tolerance import Scores, Tolerance
from dynamo_backends.interface.compiler import compiler
from dynamo_backends.interface.errors import brief_error
from dynamo_backends.interface.report import GraphReport, record
from harness.report import environment_line, refused, save_json
from harness.report import table as make_table

SINGLE = ("inductor_freezing", "onnxrt", "ov")
"""Float32 candidates, and those that have int8."""

LEAST_COSINE = 0.99
LEAST_RATIO = 1.3
"""Over the best float32 candidate, where the processor has instructions for int8 (VNNI)."""

_BATCHES = 9

Inputs = tuple[Any, ...] | dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """A model with batches that calibrate and prove it, and one that nobody has seen."""

    name: str
    model: nn.Module
    batches: Sequence[Inputs]
    unseen: Inputs


@dataclass(frozen=True)
class Int8Row:
    """What came of one model."""

    model: str
    eager_ms: float = 0.0  # median of a call
    float32: Mapping[str, float] = dataclasses.field(default_factory=dict)  # speedup by backend
    ratio: float = 0.0  # speedup of autotune in int8
    chosen: str = ""  # whom that chose
    cosine: float = 0.0  # mean, with eager on the batch that nobody has seen
    tuning_s: float = 0.0  # of the first call
    error: str = ""  # what failed

    @property
    def best(self) -> float:
        """The best float32 candidate's ratio, eager's among them."""
        return max([1.0, *self.float32.values()])

    @property
    def passed(self) -> bool:
        """Whether it is accurate, and fast where the processor has instructions for int8."""
        fast = saturates() or self.ratio >= LEAST_RATIO * self.best
        return not self.error and self.cosine >= LEAST_COSINE and fast


def run(settings: Any, backends: Sequence[str], console: Console) -> int:
    """Measures the models that the command line names; returns the exit status."""
    console.print(f"[dim]{environment_line()}[/]")
    rows: list[Int8Row] = []
    for name in settings.models or SUBJECTS:
        if name not in SUBJECTS:
            return refused(f"there is no model {name}; there are {', '.join(SUBJECTS)}", console)
        try:
            subject = SUBJECTS[name](settings.scale, settings.batch)
        except ModuleNotFoundError as error:
            return refused(error, console)
        rows.append(measured(subject, backends, settings, console))
        if settings.json:
            kept = [asdict(row) for row in rows]
            save_json(settings.json, "int8", kept, date=time.strftime("%Y-%m-%d"))
    console.print(table(rows))
    return 0 if all(row.passed for row in rows) else 1


def measured(subject: Subject, backends: Sequence[str], settings: Any, console: Console) -> Int8Row:
    """Compiles and times one model."""
    tolerance = {"cosine": LEAST_COSINE}
    options = {
        "precision": "int8", "tolerance": tolerance, "calibration": subject.batches,
        "candidates": tuple(backends), "budget_s": settings.tuning,
    }  # fmt: skip
    steps: dict[str, Callable[[], Any]] = {"eager": lambda: call(subject.model, subject.unseen)}
    with torch.no_grad():
        expected = steps["eager"]()
        try:
            start = time.perf_counter()
            steps["int8"], report = _compiled(subject, "autotune", options)
            tuning_s = time.perf_counter() - start
        except Exception as error:
            return Int8Row(subject.name, error=brief_error(error))
        for name in backends:
            steps[name], _ = _compiled(subject, name, {})
        scores = Scores(Tolerance.parse(tolerance, "autotune"))
        scores.add(pytree.tree_leaves(expected), pytree.tree_leaves(steps["int8"]()))
        timings = time_candidates(steps, settings.rounds, pause_s=0.03)
    console.print(candidates_table(report))
    ratios = {name: timing.speedup.value for name, timing in timings.items()}
    return Int8Row(
        subject.name,
        timings["eager"].median * 1e3,
        {name: ratios[name] for name in backends},
        ratios["int8"],
        report.chosen,
        scores.measured["cosine"],
        tuning_s,
    )


def _compiled(
    subject: Subject, backend: str, options: Mapping[str, Any]
) -> tuple[Callable[[], Any], GraphReport]:
    torch.compiler.reset()
    compiled: Any = torch.compile(subject.model, backend=compiler(backend, **options))
    with record() as reports:
        call(compiled, subject.unseen)
    return lambda: call(compiled, subject.unseen), reports[0]


def table(rows: Sequence[Int8Row]) -> Table:
    """One line per model."""
    lines = [
        [row.model if row.passed else f"[red]{row.model}[/]", f"{row.eager_ms:.1f}",
         f"{row.best:.2f}", f"{row.ratio:.2f}", f"{row.ratio / row.best:.2f}", f"{row.cosine:.4f}",
         row.error or row.chosen]
        for row in rows
    ]  # fmt: skip
    heads = "model", "eager ms", "best float32", "int8", "int8 over that", "cosine", "chosen"
    return make_table(heads, lines, "speedup over eager, int8, inference")


def published(content: Mapping[str, Any]) -> list[Table | str]:
    """What a file of results says, for a page."""
    return [table([Int8Row(**row) for row in content["results"]])]


def _demo() -> Any:
    """examples/demo.py, which has the trained encoder and the photographs."""
    folder = str(Path(__file__).parents[2] / "examples")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module("demo")


def _minilm(scale: Scale, batch: int) -> Subject:
    demo = _demo()
    model, unseen = demo.sentence_encoder()
    rows, length = unseen["input_ids"].shape
    text = (Path(__file__).parents[2] / "examples" / "poems.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if len(line.split()) > 3]
    batches = [demo.tokens(lines[i * rows : (i + 1) * rows], length) for i in range(_BATCHES)]
    return Subject("minilm", model, batches, unseen)


def _resnet50(scale: Scale, batch: int) -> Subject:
    demo = _demo()
    size, depths = (224, [3, 4, 6, 3]) if scale == "bench" else (64, [1, 1, 1, 1])
    unseen, large = demo.photographs(size), demo.photographs(2 * size)
    generator = torch.Generator().manual_seed(0)
    corners = torch.randint(size, (_BATCHES, 2), generator=generator).tolist()
    parts: list[Tensor] = [large[:, :, y : y + size, x : x + size].clone() for y, x in corners]
    return Subject("resnet50", demo.resnet(depths, unseen), [{"pixels": p} for p in parts],
                   {"pixels": unseen})  # fmt: skip


def _bert(scale: Scale, batch: int) -> Subject:
    case = find_case("classic", "bert", scale, batch)
    others = [dataclasses.replace(case, seed=100 + i).inputs() for i in range(_BATCHES)]
    return Subject("bert", case.make(), others, case.inputs())


SUBJECTS: Mapping[str, Callable[[Scale, int], Subject]] = {
    "minilm": _minilm,
    "resnet50": _resnet50,
    "bert": _bert,
}
