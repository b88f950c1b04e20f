"""How much faster a process starts that finds its compiled executables on disk.

    python benchmarks/cache_start.py
    python benchmarks/cache_start.py --precompile

Each start is a fresh process; counted are `torch.compile` and its first call. A cold start has
empty cache folders, the warm one after it finds there what the cold one left. With --precompile
torch keeps what it captured as well (see docs/capture.md): the warm start captures nothing.
"""

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.progress import track
from rich.table import Table

import harness


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if the cache was not used or a limit was not reached."""
    settings = parse(arguments)
    if settings.child:
        return child(settings)
    console = harness.announce()
    runs: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    for _ in track(range(settings.rounds), "starting", console=console, transient=True):
        with tempfile.TemporaryDirectory() as folder:
            for start in runs:
                runs[start].append(in_a_process(settings, folder))
    console.print(table(runs, f"{settings.model} on {settings.backend}"))
    ratio = ratio_of(runs)
    console.print(sentence(ratio))
    if settings.json:
        harness.save_json(settings.json, "cache start", [runs], settings=vars(settings))
    unused = any(
        not 0 < m["executables"] <= m["cache_hits"] or (m["captured"] and settings.precompile)
        for m in runs["warm"]
    )
    if unused:
        console.print("[red]a warm start made what should have been on disk[/]")
    slow = settings.at_least is not None and ratio < settings.at_least
    return 1 if unused or slow else 0


def table(runs: Mapping[str, Sequence[Mapping[str, Any]]], title: str) -> Table:
    """Seconds, medians, of cold and warm starts."""
    found = Table("start", "first call s", "of it in the backend s", "from disk", title=title)
    for start, measured in runs.items():
        seconds = [
            f"{statistics.median(m[name] for m in measured):.2f}"
            for name in ("first_call_s", "backend_s")
        ]
        hits = f"{measured[0]['cache_hits']} of {measured[0]['executables']}"
        found.add_row(start, *seconds, hits)
    return found


def ratio_of(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> float:
    """How many times as fast a warm start is as a cold one."""
    cold, warm = (statistics.median(m["first_call_s"] for m in runs[s]) for s in ("cold", "warm"))
    return cold / warm


def sentence(ratio: float) -> str:
    """The result in short."""
    return f"a warm start is {ratio:.2f} × as fast as a cold one"


def published(content: Mapping[str, Any]) -> list[Table | str]:
    """What a file of results says, for a page."""
    (runs,), settings = content["results"], content["settings"]
    title = f"{settings['model']} on {settings['backend']}"
    return [table(runs, title), sentence(ratio_of(runs))]


def in_a_process(settings: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Makes the first call in a fresh process that uses the cache folder."""
    command = [__file__, "--child", "start", "--model", settings.model]
    command += ["--batch", str(settings.batch), "--backend", settings.backend]
    environment = {
        "DYNAMO_BACKENDS_CACHE": f"{folder}/executables",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/torch",
        "TORCH_CACHING_PRECOMPILE": str(int(settings.precompile)),
    }
    return harness.run_child(command, environment)


@torch.no_grad()
def child(settings: argparse.Namespace) -> int:
    """Makes the first call and hands back what it took."""
    case = harness.find_case("classic", settings.model, batch=settings.batch)
    compiled = harness.compile_model(case.make(), case.inputs(), settings.backend)
    torch.compiler.save_cache_artifacts()
    harness.hand_back(
        first_call_s=compiled.first_call_s,
        captured=compiled.graphs,
        backend_s=compiled.backend_s or 0.0,
        executables=sum(report.executables for report in compiled.reports),
        cache_hits=sum(report.cache_hits for report in compiled.reports),
    )
    return 0


def parse(arguments: Sequence[str] | None) -> Any:
    """Parses the command line."""
    parser = harness.process_arguments(__doc__)
    parser.add_argument("--precompile", action="store_true", help="torch keeps the capture as well")
    parser.add_argument("--at-least", type=float, metavar="RATIO", help="smallest that passes")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
