"""How much slower `import torch` gets through this package's entry point.

    python benchmarks/import_time.py

Fresh interpreters import torch and then load and run the entry point as torch does; what that adds
is measured inside the process, so that the noise of a whole `import torch` does not hide it.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.progress import track

import harness

CODE = """
import time
import torch
from importlib.metadata import entry_points
(point,) = [p for p in entry_points(group="torch.backends") if p.name == "dynamo_backends"]
start = time.perf_counter()
point.load()()
print(time.perf_counter() - start)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if the median is above the limit."""
    parser = harness.arguments(__doc__, rounds=15)
    parser.add_argument("--limit", type=float, default=2.0, metavar="MS")
    settings = parser.parse_args(arguments)
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    times = []
    for _ in track(range(settings.rounds), "importing", transient=True):
        command = [sys.executable, "-c", CODE]
        out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        times.append(float(out.stdout) * 1e3)
    harness.report(published, settings, "import time", times, harness.make_console())
    return int(statistics.median(times) > settings.limit)


def published(content: Mapping[str, Any]) -> list[str]:
    """What the package adds, from milliseconds, in a sentence."""
    times = content["results"]
    median, span = statistics.median(times), f"{min(times):.2f} to {max(times):.2f}"
    return [f"import torch + {median:.2f} ms (median of {len(times)}, {span})"]


if __name__ == "__main__":
    raise SystemExit(main())
