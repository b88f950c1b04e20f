"""Every usable GPU backend on eleven models: are the results right, how fast, are targets met?

    python benchmarks/gpu.py
    timeout 540 python benchmarks/gpu.py     # the same command goes on where this one was ended
    python benchmarks/gpu.py --models bert gpt2 --batch 1 --dtype float32 --mode inference
    python benchmarks/gpu.py --device cpu --scale test --models resnet18 --backends openxla

This is `dynamo-backends bench gpu` with the backends that can run here, at batch 1 and 32, in
float32 and bfloat16, in inference and training; it takes that command's options, and continues
gpu-results.json. The exit status is 1 if a backend failed or, on a GPU, a target is missed; and 2
without a CUDA device.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import harness
from autotune import AUTOTUNE, OF_BEST, ratio_of
from dynamo_backends._torch_private.dynamo_control import torch_backends
from dynamo_backends.bench import saved_run
from dynamo_backends.bench.cells import Outcome, Run
from dynamo_backends.bench.statistics import geometric_mean
from dynamo_backends.bench.suites.catalogue import gpu
from dynamo_backends.cli.bench import path
from dynamo_backends.cli.main import main as command
from dynamo_backends.interface.registry import get_backend, list_backends

BACKENDS = {
    "cuda": ("inductor", "cudagraphs", "cudagraphs_eager", "openxla", "onnxrt_cuda", "tensorrt",
             "nvfuser", "nvfuser_cudagraphs", "autotune"),
    "cpu": ("inductor", "openxla", "onnxrt", "autotune"),
}  # fmt: skip
"""By device type."""

TORCHS = {"inductor": ("cuda", "cpu"), "cudagraphs": ("cuda",)}
OPENXLA_MEAN = 1.29  # what the original TorchDynamo's XLA backend reached on GPUs
CUDAGRAPHS_RATIO = 2.0
OVERHEAD_BOUND = 2.0  # the largest batch takes less than this much longer than the smallest

Models = Mapping[str, Mapping[str, Outcome]]
"""Outcomes by model and backend."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark, or a part of it; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", default="bench")
    parser.add_argument("--output", type=path, default="gpu-results.json")
    parser.add_argument("--backends", nargs="+")
    settings, _ = parser.parse_known_args(given)
    console = harness.make_console()
    backends = settings.backends or []
    for name in () if backends else BACKENDS.get(settings.device, ()):
        reason = why_not(name, settings.device)
        if reason:
            console.print(f"[dim]without {name}: {reason}[/]", highlight=False)
        else:
            backends.append(name)
    defaults = ["--device", "cuda", "--batch", "1", "32", "--dtype", "float32", "bf16",
                "--mode", "inference", "training", "--patience", "30",
                "--output", "gpu-results.json", "--resume"]  # fmt: skip
    status = command(["bench", "gpu", *defaults, "--backends", *backends, *given])
    if status <= 1 and (settings.device, settings.scale) == ("cuda", "bench"):
        for aim in targets(saved_run.read(settings.output)):
            console.print(f"target: {aim.line()}", highlight=False)
            status = max(status, int(aim.met is False))
    return status


def why_not(name: str, device: str) -> str:
    """Why a backend cannot run on a device here; empty if it can."""
    if name in TORCHS:
        return "" if device in TORCHS[name] else f"it is not for {device}"
    if name not in list_backends():
        known = name in torch_backends(debugging=True)
        return "" if known else "this version does not have it"
    available = get_backend(name).availability()
    if not available.usable:
        return f"{available.reason} ({available.remedy})"
    if available.devices and device not in available.devices:
        return f"it can run on {', '.join(available.devices)} here, not on {device}"
    return ""


@dataclass(frozen=True)
class Target:
    """What was aimed at, what was measured, and whether it is met; None: it cannot be said yet."""

    what: str
    found: str = ""
    met: bool | None = None

    def line(self) -> str:
        """In one line."""
        verdict = {True: "met", False: "NOT met", None: "open"}[self.met]
        return f"{self.what}: {verdict}" + (f" ({self.found})" if self.found else "")


def targets(run: Run, expected: int = len(gpu())) -> list[Target]:
    """The three targets; `expected` is how many models a complete table has."""
    tables: dict[tuple[str, str, int], dict[str, dict[str, Outcome]]] = {}
    for cell, outcome in run.outcomes.items():
        kind = (cell.mode, cell.dtype, cell.batch or 0)
        tables.setdefault(kind, {}).setdefault(cell.model, {})[cell.backend] = outcome
    simple = {
        b: models for (*kind, b), models in tables.items() if kind == ["inference", "float32"]
    }
    whole = all(len(models) == expected for models in tables.values())
    return [_openxla(simple, expected), _autotune(tables, whole), _cudagraphs(simple, expected)]


def ratio(outcome: Outcome | None) -> float:
    """Eager's time over the backend's; a model that it cannot run right counts as eager."""
    return ratio_of(outcome) or 1.0


def _openxla(tables: Mapping[int, Models], expected: int) -> Target:
    what = f"openxla >= {OPENXLA_MEAN} x eager, geometric mean of float32 inference"
    found = [o["openxla"] for models in tables.values() for o in models.values() if "openxla" in o]
    if not found:
        return Target(what)
    mean = geometric_mean(map(ratio, found))
    whole = all(len(models) == expected for models in tables.values())
    said = f"{mean:.2f} over {len(found)} cells"
    return Target(what, said, mean >= OPENXLA_MEAN if whole else None)


def _autotune(tables: Mapping[tuple[str, str, int], Models], whole: bool) -> Target:
    what = "autotune within 3% of the best candidate on every model"
    shares = {}
    for (mode, dtype, batch), models in tables.items():
        for model, outcomes in models.items():
            others = [ratio(o) for name, o in outcomes.items() if name != AUTOTUNE]
            if AUTOTUNE in outcomes and others:
                own = outcomes[AUTOTUNE]
                place = f"{model} in {mode}, {dtype}, batch {batch}"
                shares[place] = ratio(own) / max(1.0, *others) if own.passed else 0.0
    if not shares:
        return Target(what)
    worst = min(shares, key=shares.__getitem__)
    reached = sum(share >= OF_BEST for share in shares.values())
    found = f"{reached} of {len(shares)} cells; the worst is {shares[worst]:.2f}, {worst}"
    good = reached == len(shares)
    return Target(what, found, None if good and not whole else good)


def _cudagraphs(tables: Mapping[int, Models], expected: int) -> Target:
    what = f"cudagraphs >= {CUDAGRAPHS_RATIO:.0f} x eager at batch 1 on overhead-bound models"
    small, large = tables.get(1, {}), tables.get(max(tables, default=1), {})
    names = ("cudagraphs", "cudagraphs_eager")
    if small is large or not any(name in o for o in small.values() for name in names):
        return Target(what)
    both = {*small} & {*large}
    bound = [m for m in both if _eager_s(large[m]) < OVERHEAD_BOUND * _eager_s(small[m])]
    if not bound:
        return Target(what, "no model is overhead-bound")
    ratios = {m: max(ratio(small[m].get(name)) for name in names) for m in sorted(bound)}
    found = ", ".join(f"{model} {value:.2f}" for model, value in ratios.items())
    whole = len(small) == len(large) == expected
    met = all(value >= CUDAGRAPHS_RATIO for value in ratios.values())
    return Target(what, found, met if whole else None)


def _eager_s(outcomes: Mapping[str, Outcome]) -> float:
    """Median of eager's calls, beside whichever backend; NaN if nothing was timed."""
    samples = [second for outcome in outcomes.values() for second in outcome.eager_s]
    return statistics.median(samples) if samples else math.nan


if __name__ == "__main__":
    raise SystemExit(main())
