"""How long compiling models takes: cold, with known verdicts, in a second process, and by hand."""

import functools
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from dynamo_backends.bench.exports import EXPORTS
from dynamo_backends.bench.statistics import geometric_mean
from dynamo_backends.bench.suites import ModelCase, find_cases, suite
from dynamo_backends.bench.suites.case import image
from dynamo_backends.bench.torchvision_shim import import_torchvision
from harness.kept import Results
from harness.processes import caches_in, call_apart
from harness.report import table as make_table
from harness.runner import compile_model

BY_HAND = {"onnxrt": "export:onnxruntime", "ov": "export:openvino"}
"""For each backend: how its models are exported and loaded by hand (see `bench.exports`)."""

CACHING = ("openxla", "onnxrt", "ov", "inductor_freezing")
"""Backends whose second process may take `OF_COLD` of the first one's time."""

WHO = ("inductor", *CACHING, *BY_HAND.values())
LATER = ("efficientnet_b0", "swin_t")
"""Builders of torchvision.models, besides the ten classic ones."""

OF_BY_HAND = 1.5
OF_INDUCTOR = {"inductor_freezing": 0.6, "openxla": 0.25}
OF_COLD = 0.6
_KNOWN = ("verdicts", "choices")  # what is kept where verdicts are known and no graph is
_PATIENCE_S = 1200.0


def cases(batch: int) -> list[ModelCase]:
    """The twelve models."""
    models, conv = import_torchvision().models, frozenset({"conv"})
    builds = {name: functools.partial(models.get_model, name, weights=None) for name in LATER}
    later = [ModelCase(name, build, image(batch, 224), conv) for name, build in builds.items()]
    return [*suite("classic", "bench", batch), *later]


def in_processes(name: str, batch: int) -> dict[str, Any]:
    """Compiles a model in one process after the other: seconds, of processors too, and stages.

    Args:
        name: Of the model, "/", and who compiles it.
        batch: Images per call.

    Raises:
        ChildError: One failed.
    """
    who = name.rpartition("/")[2]
    with tempfile.TemporaryDirectory() as folder:
        # Inductor keeps its precompiled header in the folder for temporary files.
        caches = caches_in(folder) | {"TMPDIR": folder}

        def start() -> Any:
            return call_apart(measured, name, batch, environment=caches, timeout_s=_PATIENCE_S)

        found = {"cold": start()}
        if who in EXPORTS:
            return found
        found["second"] = start()
        if who in BY_HAND:
            for kept in Path(caches["DYNAMO_BACKENDS_CACHE"]).iterdir():
                if kept.is_file():
                    kept.unlink()
                elif kept.name not in _KNOWN:
                    shutil.rmtree(kept)
            found["verdicts"] = start()
        return found


@torch.no_grad()
def measured(name: str, batch: int) -> dict[str, Any]:
    """Compiles and calls a model once: seconds."""
    model_name, _, who = name.partition("/")
    (case,) = find_cases(cases(batch), [model_name])
    model, inputs = case.make(), case.inputs()
    start, cpu_start = time.perf_counter(), _cpu_s()
    stages: dict[str, float] = {}
    if who in EXPORTS:
        EXPORTS[who](model, inputs)()
    else:
        for report in compile_model(model, inputs, who).reports:
            for stage, seconds in report.stage_seconds.items():
                stages[stage] = stages.get(stage, 0.0) + seconds
    return {"s": time.perf_counter() - start, "cpu_s": _cpu_s() - cpu_start, "stages": stages}


def _cpu_s() -> float:
    return sum(os.times()[:4])


def table(models: Sequence[str], results: Results) -> Table:
    """One line per model: seconds of each way."""
    title = "seconds of a first call: cold / verdicts known / second process"
    rows = [[m, *(_cell(results.get(f"{m}/{who}")) for who in WHO)] for m in models]
    return make_table(("model", *WHO), rows, title)


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None or "error" in row:
        return "-" if row is None else "failed"
    ways = ("cold", "verdicts", "second")
    return " / ".join(f"{row[way]['s']:.1f}" for way in ways if way in row)


@dataclass(frozen=True)
class Limit:
    """How long one way (who compiles, in which process) may take, as a part of another one.

    `text` is the other one in words, `most` the largest part in the geometric mean.
    """

    way: tuple[str, str]
    other: tuple[str, str]
    text: str
    most: float

    def ratios(self, models: Sequence[str], results: Results) -> list[float]:
        """The parts, of the models for which both were measured."""
        found = []
        for model in models:
            rows = [results.get(f"{model}/{who}", {}).get(p) for who, p in (self.way, self.other)]
            if all(rows):
                found.append(rows[0]["s"] / rows[1]["s"])
        return found

    def said(self, ratios: Sequence[float]) -> str:
        """What was measured, in words."""
        return (
            f"{self.way[0]} takes {geometric_mean(ratios):.2f} times as long {self.text} "
            f"(at most {self.most:g}; {max(ratios):.2f} at worst)"
        )


def limits() -> list[Limit]:
    """All there are."""
    by_hand = "as exporting and loading by hand"
    return [
        *(Limit((n, "cold"), (hand, "cold"), by_hand, OF_BY_HAND) for n, hand in BY_HAND.items()),
        *(
            Limit((n, "cold"), ("inductor", "cold"), "as inductor", x)
            for n, x in OF_INDUCTOR.items()
        ),
        *(Limit((n, "second"), (n, "cold"), "in a second process", OF_COLD) for n in CACHING),
    ]


def means(models: Sequence[str], results: Results) -> list[str]:
    """What each limit is about, as it was measured."""
    return [limit.said(found) for limit in limits() if (found := limit.ratios(models, results))]


def problems(models: Sequence[str], results: Results) -> list[str]:
    """Which limits are exceeded, and what failed."""
    found = [f"{name}: {row['error']}" for name, row in results.items() if "error" in row]
    for limit in limits():
        ratios = limit.ratios(models, results)
        if ratios and geometric_mean(ratios) > limit.most:
            found.append(limit.said(ratios))
    return found
