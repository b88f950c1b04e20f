"""How long a new process takes from a package to the model's first result.

    python benchmarks/package_start.py
    python benchmarks/package_start.py --models bert_base --backends ov

ResNet-50 (one image) and BERT-base (64 tokens), saved by each backend. A start is a process of its
own: "imports" are torch, this package and the vendor's; "load" and "first call" are after these,
"processor" is the processor's time of both, which other programs change less. "Dynamo" says
whether anything has imported it.
"""

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

import harness

VENDORS = {
    "onnxrt": "dynamo_backends.ort.compiler",
    "ov": "dynamo_backends.openvino.compiler",
    "openxla": "dynamo_backends.xla.updating",
}
MODELS = ("resnet50", "bert_base")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if something was compiled in a start."""
    settings = parse(arguments)
    if settings.child == "save":
        return save(settings.models[0], settings.backends[0], settings.path)
    if settings.child == "start":
        return start(settings.models[0], settings.backends[0], settings.path)
    console = harness.announce()
    rows = []
    for model in settings.models:
        for backend in settings.backends:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "m.dbp"
                command = [__file__, "--models", model, "--backends", backend, "--path", str(path)]
                harness.run_child([*command, "--child", "save"])
                starts = [harness.run_child([*command, "--child", "start"])
                          for _ in range(settings.rounds)]  # fmt: skip
                mib = path.stat().st_size / 2**20
            rows.append({"model": model, "backend": backend, "starts": starts, "mib": mib})
    console.print(table(rows))
    if settings.json:
        harness.save_json(settings.json, "package start", rows, settings=vars(settings))
    return int(any(start["compiled"] for row in rows for start in row["starts"]))


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Seconds, medians, by model and backend."""
    found = Table("model", "backend", "imports s", "load s", "first call s", "processor s",
                  "Dynamo", "MiB")  # fmt: skip
    for row in rows:
        starts, names = row["starts"], ("imports", "load", "first", "processor")
        medians = [statistics.median(s[name] for s in starts) for name in names]
        dynamo = "yes" if any(s["dynamo"] for s in starts) else "no"
        seconds = [f"{m:.2f}" for m in medians]
        found.add_row(row["model"], row["backend"], *seconds, dynamo, f"{row['mib']:.0f}")
    return found


def published(content: Mapping[str, Any]) -> list[Table | str]:
    """What a file of results says, for a page."""
    return [table(content["results"])]


def inputs(model: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call."""
    import torch

    if model == "resnet50":
        return (torch.rand(1, 3, 224, 224),), {}
    mask = torch.ones(1, 64, dtype=torch.long)
    return (), {"input_ids": torch.arange(64)[None], "attention_mask": mask}


def save(model: str, backend: str, path: str) -> int:
    """In a process of its own: writes a package."""
    import torch

    import dynamo_backends
    from dynamo_backends.bench.torchvision_shim import import_torchvision, import_transformers

    torch.manual_seed(0)
    if model == "resnet50":
        made = import_torchvision().models.resnet50()
    else:
        transformers = import_transformers()
        made = transformers.BertModel(transformers.BertConfig())
    args, kwargs = inputs(model)
    dynamo_backends.save(made.eval(), path, args, kwargs, backend=backend)
    harness.hand_back(saved=path)
    return 0


def start(model: str, backend: str, path: str) -> int:
    """In a process of its own: loads a package and calls the model."""
    import importlib
    import sys
    import time

    began = time.perf_counter()
    import torch  # noqa: F401

    import dynamo_backends.package

    importlib.import_module(VENDORS[backend])
    args, kwargs = inputs(model)
    imported, processor = time.perf_counter(), time.process_time()
    module = dynamo_backends.package.load(path, strict=True)
    loaded = time.perf_counter()
    module(*args, **kwargs)
    called = time.perf_counter()
    processor = time.process_time() - processor
    (report,) = module.reports
    harness.hand_back(
        imports=imported - began, load=loaded - imported, first=called - loaded,
        processor=processor, dynamo="torch._dynamo" in sys.modules,
        compiled=report.executables - report.cache_hits,
    )  # fmt: skip
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--backends", nargs="+", default=list(VENDORS), choices=VENDORS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="save the results")
    parser.add_argument("--child", choices=("save", "start"), help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
