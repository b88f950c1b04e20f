"""What an embedding server takes with compiled code and in eager: throughput, latency, processors.

    python benchmarks/serving.py
    python benchmarks/serving.py --backend ov --seconds 40 --rounds 4

examples/serve.py saves the demo's MiniLM as a package and serves it, compiled and in eager, on two
ports of this machine; examples/serve_load.py asks both in turns. The exit status is 1 if an answer
was wrong or missing, or a request compiled something.
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

import harness

EXAMPLES = Path(__file__).parents[1] / "examples"
WAYS: dict[str, tuple[str, ...]] = {"compiled": (), "eager": ("--eager",)}
"""A way of serving, and what it adds to the command line."""

sys.path.append(str(EXAMPLES))
import serve_load  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.arguments(__doc__, rounds=4)
    parser.add_argument("--backend", default="onnxrt", help="who compiles the model")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=40.0, help="of requests, for each server")
    parser.add_argument("--lengths", type=int, nargs=2, default=[5, 128], metavar="TOKENS")
    settings = parser.parse_args(arguments)
    console = harness.announce()
    try:
        with console.status("saving, serving and asking"):
            seen, compiled = measured(settings)
    except harness.ChildError as error:
        harness.refused(error, console)
        return 1
    records = [record(way, found, compiled[way]) for way, found in seen.items()]
    harness.report(published, settings, "serving", records, console)
    return int(any(r["failed"] or r["compilations"] or not r["answers"] for r in records))


def measured(
    settings: argparse.Namespace,
) -> tuple[dict[str, serve_load.Seen], dict[str, float]]:
    """What clients saw of each way, and what was compiled in their requests.

    Raises:
        ChildError: A server did not start.
    """
    seen = {way: serve_load.Seen() for way in WAYS}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as servers:
        package = f"{folder}/minilm.dbp"
        serve = [sys.executable, str(EXAMPLES / "serve.py")]
        saved = subprocess.run(
            [*serve, "save", package, "--backend", settings.backend],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if saved.returncode:
            raise harness.ChildError(saved.stderr[-2000:])
        urls = {
            way: servers.enter_context(served([*serve, "run", package, *flags]))
            for way, flags in WAYS.items()
        }
        seconds, lengths = settings.seconds / settings.rounds, tuple(settings.lengths)
        for number in range(settings.rounds):
            for way, url in urls.items():
                serve_load.load(url, seen[way], settings.clients, lengths, seconds, number)
        counts = {way: serve_load.count(url, "embed_compiled_total") for way, url in urls.items()}
    return seen, counts


@contextlib.contextmanager
def served(command: Sequence[str], patience_s: float = 300) -> Iterator[str]:
    """Inside, a server answers at this address.

    Raises:
        ChildError: It ended, or did not answer in that time.
    """
    port = harness.free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as said:
        server = subprocess.Popen(
            [*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=said
        )
        try:
            until = time.monotonic() + patience_s
            while not serve_load.count(url, "embed_compiled_total") >= 0:  # until it says a number
                if server.poll() is not None or time.monotonic() > until:
                    said.seek(0)
                    raise harness.ChildError(
                        f"{' '.join(command)} does not answer: {said.read()[-2000:]}"
                    )
                time.sleep(0.2)
            yield url
        finally:
            server.terminate()
            server.wait()


def record(way: str, seen: serve_load.Seen, compilations: float) -> dict[str, Any]:
    """What is saved of a way."""
    quantiles = (50, 95, 99) if seen.latencies else ()
    return {
        "way": way,
        "answers": len(seen.latencies),
        "failed": len(seen.failed),
        "compilations": compilations,
        "requests_a_second": seen.throughput,
        "latency_ms": {str(q): seen.quantile(q) for q in quantiles},
        "processor_s": seen.processor,
    }


def published(content: Mapping[str, Any]) -> list[Table | str]:
    """What clients saw of each way, and what compiling gains."""
    lines = []
    rows = {row["way"]: row for row in content["results"]}
    for way, row in rows.items():
        latencies = [f"{ms:.1f}" for ms in row["latency_ms"].values()] or ["-"] * 3
        each = f"{1e3 * row['processor_s'] / max(row['answers'], 1):.1f}"
        counts = str(row["failed"]), f"{row['compilations']:g}"
        lines.append([way, f"{row['requests_a_second']:.1f}", *latencies, each, *counts])
    heads = (
        "", "requests a second", "p50 ms", "p95", "p99", "s of processors for 1000", "failures",
        "compilations",
    )  # fmt: skip
    table = harness.table(heads, lines)
    if not all(row["answers"] for row in rows.values()):
        return [table]
    ours, eager = (rows[way] for way in WAYS)
    more = ours["requests_a_second"] / eager["requests_a_second"]
    later = ours["latency_ms"]["95"] / eager["latency_ms"]["95"]
    return [table, f"compiled: {more:.2f} times the throughput, {later:.2f} times the p95 latency"]


if __name__ == "__main__":
    sys.exit(main())
