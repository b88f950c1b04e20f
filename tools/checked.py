"""Writes docs/checked-backends.md from the runs of `dynamo-backends conformance` in docs/checked/.

python tools/checked.py [FILE.json ...]

Files are copied to docs/checked/ first; each replaces an earlier run of its backend.
"""

import json
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dynamo_backends.conformance.outcomes import GROUPS, UNTRIED, Outcome
from dynamo_backends.conformance.pages import page, table

ROOT = Path(__file__).parents[1]
DATA, PAGE = ROOT / "docs/checked", ROOT / "docs/checked-backends.md"

HEAD = """\
# Checked backends

Results of [`dynamo-backends conformance`](checking-backends.md) for some backends: the number of
checks that failed, of those that could be run. `python tools/checked.py` writes this page from the
runs in `docs/checked/`.

`openvino` is OpenVINO's own backend; this package's is `ov`. On processors with AVX512-BF16, such
as that of its run, OpenVINO computes float32 in bfloat16 unless the option
`INFERENCE_PRECISION_HINT` is `f32`, which is less accurate than eager: differences of less than 0.1
may come from that.
"""


def text(runs: Sequence[dict[str, Any]]) -> str:
    """The page of some runs."""
    rows = [(f"[{name(run)}](#conformance-of-{name(run)})", *_counts(run)) for run in runs]
    parts = [HEAD, table(("backend", *GROUPS), rows) + "\n", *(page(run, 2) for run in runs)]
    return "\n".join(parts)


def name(run: dict[str, Any]) -> str:
    """The backend of a run."""
    return str(run["context"]["backend"])


def _counts(run: dict[str, Any]) -> list[str]:
    outcomes = [Outcome.from_dict(given) for given in run["results"]]
    cells = []
    for group in GROUPS:
        tried = [o for o in outcomes if o.group == group and o.status not in UNTRIED]
        failed = Counter(o.failed for o in tried)[True]
        cells.append(f"{failed} of {len(tried)}" if tried else "not run")
    return cells


def main(files: Sequence[str]) -> None:
    """Copies runs and writes the page."""
    DATA.mkdir(exist_ok=True)
    for file in files:
        shutil.copy(file, DATA / Path(file).name)
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(DATA.glob("*.json"))]
    PAGE.write_text(text(runs), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
