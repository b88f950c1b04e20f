"""How long a new process takes from a package to the model's first result.

    python benchmarks/package_start.py
    python benchmarks/package_start.py --models bert_base --backends ov

ResNet-50 (one image) and BERT-base (64 tokens), saved by each backend. A start is a process of its
own: "imports" are those of the vendor, after torch and this package; "load" and "first call" come
after them, "processor" is the processor's time of both, which other programs change less. "Dynamo"
says whether anything has imported it. The exit status is 1 if a start compiled something.
"""

import importlib
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

import dynamo_backends
import harness

VENDORS = {
    "onnxrt": "dynamo_backends.ort.compiler",
    "ov": "dynamo_backends.openvino.compiler",
    "openxla": "dynamo_backends.xla.updating",
}
MODELS = ("resnet50", "bert_base")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if something was compiled in a start."""
    parser = harness.arguments(__doc__, rounds=3)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--backends", nargs="+", default=list(VENDORS), choices=VENDORS)
    settings = parser.parse_args(arguments)
    console = harness.announce()
    rows = []
    for model in settings.models:
        for backend in settings.backends:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "m.dbp"
                case = model, backend, str(path)
                harness.call_apart(save, *case)
                starts = [harness.call_apart(start, *case) for _ in range(settings.rounds)]
                mib = path.stat().st_size / 2**20
            rows.append({"model": model, "backend": backend, "starts": starts, "mib": mib})
    harness.report(published, settings, "package start", rows, console)
    return int(any(start["compiled"] for row in rows for start in row["starts"]))


def inputs(model: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call."""
    if model == "resnet50":
        return (torch.rand(1, 3, 224, 224),), {}
    mask = torch.ones(1, 64, dtype=torch.long)
    return (), {"input_ids": torch.arange(64)[None], "attention_mask": mask}


def save(model: str, backend: str, path: str) -> None:
    """In a process of its own: writes a package."""
    torch.manual_seed(0)
    if model == "resnet50":
        made = harness.import_torchvision().models.resnet50()
    else:
        transformers = harness.import_transformers()
        made = transformers.BertModel(transformers.BertConfig())
    args, kwargs = inputs(model)
    dynamo_backends.save(made.eval(), path, args, kwargs, backend=backend)


def start(model: str, backend: str, path: str) -> dict[str, Any]:
    """In a process of its own: loads a package and calls the model."""
    began = time.perf_counter()
    package = importlib.import_module("dynamo_backends.package")
    importlib.import_module(VENDORS[backend])
    args, kwargs = inputs(model)
    imported, processor = time.perf_counter(), time.process_time()
    module = package.load(path, strict=True)
    loaded = time.perf_counter()
    module(*args, **kwargs)
    called = time.perf_counter()
    processor = time.process_time() - processor
    (report,) = module.reports
    return {
        "imports": imported - began, "load": loaded - imported, "first": called - loaded,
        "processor": processor, "dynamo": "torch._dynamo" in sys.modules,
        "compiled": report.executables - report.cache_hits,
    }  # fmt: skip


def published(content: Mapping[str, Any]) -> list[Table]:
    """Seconds, medians, by model and backend."""
    rows = []
    for row in content["results"]:
        starts, names = row["starts"], ("imports", "load", "first", "processor")
        seconds = [f"{statistics.median(s[name] for s in starts):.2f}" for name in names]
        dynamo = "yes" if any(s["dynamo"] for s in starts) else "no"
        rows.append([row["model"], row["backend"], *seconds, dynamo, f"{row['mib']:.0f}"])
    heads = "imports s", "load s", "first call s", "processor s", "Dynamo", "MiB"
    return [harness.table(("model", "backend", *heads), rows)]


if __name__ == "__main__":
    raise SystemExit(main())
