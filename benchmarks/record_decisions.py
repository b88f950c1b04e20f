"""Records how fast every candidate of autotune is on the models of the suites, to learn from.

    python benchmarks/record_decisions.py --json decisions.json
    python benchmarks/record_decisions.py --json decisions.json --minutes 60  # the next goes on
    python benchmarks/record_decisions.py --json decisions.json --suite classic --batch 1
    python tools/priors.py learn tools/recorded/*.json decisions.json         # learns from it

Each model is tuned in a process of its own with empty caches, until every candidate is compiled,
verified and measured, and is saved then. The file also is one that `dynamo-backends cache import`
takes. Measure on a machine that does nothing else.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import torch

import harness
from dynamo_backends.autotune.decisions import Decisions
from dynamo_backends.bench.results_files import ResultError
from dynamo_backends.bench.suites import call
from dynamo_backends.interface.compiler import compiler
from harness.kept import Recorded, measure_left

CANDIDATES = ("inductor", "inductor_freezing", "openxla", "onnxrt", "ov", "ofi", "ts_trace")
SUITES = ("classic", "transformers")
_PATIENCE_S = 3600.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Records; returns 1 if a model failed, 2 if the command cannot be carried out."""
    settings = parse(arguments)
    if settings.child:
        return child(settings)
    console = harness.announce()
    try:
        names = chosen(settings)
        kept = Recorded(settings.json, "decisions", context(settings))
    except (ValueError, ResultError) as error:
        console.print(f"[red]{error}[/]", highlight=False)
        return 2
    left = measure_left(names, kept, lambda n: in_a_process(n, settings), console, settings.minutes)
    failed = {n: r["error"] for n, r in kept.results.items() if "error" in r}
    console.print(f"{len(kept.results) - len(failed)} models are recorded, {left} are left")
    for name, text in failed.items():
        console.print(f"[red]{name}: {text}[/]", highlight=False)
    return 1 if failed else 0


def chosen(settings: argparse.Namespace) -> list[str]:
    """Suite, model and batch size of each, as "classic/resnet18/4".

    Raises:
        ValueError: A model does not exist.
    """
    found = []
    for batch in settings.batch:
        for suite in settings.suite or SUITES:
            cases = harness.suite(suite, settings.scale, batch)
            found += [(suite, case.name, batch) for case in cases]
    if settings.models:
        known = sorted({model for _, model, _ in found})
        if unknown := sorted({*settings.models} - {*known}):
            raise ValueError(f"there is no model {unknown[0]}; there are {', '.join(known)}")
        found = [each for each in found if each[1] in settings.models]
    return [f"{suite}/{model}/{batch}" for suite, model, batch in found]


def context(settings: argparse.Namespace) -> dict[str, Any]:
    """What results depend on."""
    return {**harness.environment(), "scale": settings.scale, "candidates": settings.candidates}


def in_a_process(name: str, settings: argparse.Namespace) -> dict[str, Any]:
    """Tunes a model in a fresh process with empty caches."""
    command = [__file__, "--child", name, "--scale", settings.scale]
    command += ["--candidates", *settings.candidates]
    with tempfile.TemporaryDirectory() as folder:
        caches = {
            "DYNAMO_BACKENDS_CACHE": f"{folder}/cache",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/torch",
        }
        return harness.run_child(command, caches, _PATIENCE_S)


@torch.no_grad()
def child(settings: argparse.Namespace) -> int:
    """Tunes one model and hands its decisions back."""
    suite, model, batch = settings.child.split("/")
    case = harness.find_case(suite, model, settings.scale, int(batch))
    options = {"candidates": tuple(settings.candidates), "budget_s": _PATIENCE_S}
    compiled = torch.compile(case.make(), backend=compiler("autotune", **options))
    call(compiled, case.inputs())
    found = [d.to_dict() for d in Decisions().all()]
    harness.hand_back(**({"decisions": found} if found else {"error": "no graph was tuned"}))
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        epilog=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--json", metavar="FILE", help="file of results; without it nothing is kept"
    )
    parser.add_argument("--suite", action="append", choices=list(harness.SUITES))
    parser.add_argument("--models", nargs="+", metavar="NAME", help="only these models")
    parser.add_argument("--batch", type=int, nargs="+", default=[4], metavar="N")
    parser.add_argument("--candidates", nargs="+", default=list(CANDIDATES), metavar="NAME")
    parser.add_argument("--scale", default="bench", choices=["bench", "test"], help="model sizes")
    parser.add_argument("--minutes", type=float, help="begin no model later than that")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
