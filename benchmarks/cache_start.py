"""How much faster a process starts that finds its compiled executables on disk.

    python benchmarks/cache_start.py
    python benchmarks/cache_start.py --precompile

Each start is a fresh process; counted are `torch.compile` and its first call. A cold start has
empty cache folders, the warm one after it finds there what the cold one left. With --precompile
torch keeps what it captured as well (see docs/capture.md): the warm start captures nothing. The
exit status is 1 if a warm start compiles what should have been on disk.
"""

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.progress import track
from rich.table import Table

import harness


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.arguments(__doc__, rounds=3)
    parser.add_argument("--model", default="resnet50", help="of the classic suite")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--backend", default="openxla")
    parser.add_argument("--precompile", action="store_true", help="torch keeps the capture as well")
    settings = parser.parse_args(arguments)
    console = harness.announce()
    case = settings.model, settings.batch, settings.backend
    precompile = {"TORCH_CACHING_PRECOMPILE": str(int(settings.precompile))}
    runs: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}
    for _ in track(range(settings.rounds), "starting", console=console, transient=True):
        with tempfile.TemporaryDirectory() as folder:
            environment = harness.caches_in(folder) | precompile
            for starts in runs.values():
                starts.append(harness.call_apart(start, *case, environment=environment))
    harness.report(published, settings, "cache start", [runs], console)
    unused = any(
        not 0 < m["executables"] <= m["cache_hits"] or (m["captured"] and settings.precompile)
        for m in runs["warm"]
    )
    if unused:
        console.print("[red]a warm start made what should have been on disk[/]")
    return int(unused)


@torch.no_grad()
def start(model: str, batch: int, backend: str) -> dict[str, Any]:
    """Makes the first call in this process; what it took."""
    case = harness.find_case("classic", model, batch=batch)
    compiled = harness.compile_model(case.make(), case.inputs(), backend)
    torch.compiler.save_cache_artifacts()
    return {
        "first_call_s": compiled.first_call_s,
        "captured": compiled.graphs,
        "backend_s": sum(report.compile_seconds for report in compiled.reports),
        "executables": sum(report.executables for report in compiled.reports),
        "cache_hits": sum(report.cache_hits for report in compiled.reports),
    }


def published(content: Mapping[str, Any]) -> list[Table | str]:
    """Seconds of cold and warm starts, medians, and how many times as fast the latter are."""
    (runs,), settings = content["results"], content["settings"]
    rows, first_calls = [], {}
    for name, starts in runs.items():
        medians = [
            statistics.median(x[key] for x in starts) for key in ("first_call_s", "backend_s")
        ]
        first_calls[name] = medians[0]
        hits = f"{starts[0]['cache_hits']} of {starts[0]['executables']}"
        rows.append([name, *(f"{median:.2f}" for median in medians), hits])
    heads = "start", "first call s", "of it in the backend s", "from disk"
    title = f"{settings['model']} on {settings['backend']}"
    ratio = first_calls["cold"] / first_calls["warm"]
    said = f"a warm start is {ratio:.2f} × as fast as a cold one"
    return [harness.table(heads, rows, title), said]


if __name__ == "__main__":
    raise SystemExit(main())
