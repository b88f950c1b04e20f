"""Reads and writes the tables of trial verdicts that come with the package.

One table for each vendor and class of processors, `shipped/VENDOR/CLASS.json`, which `make
verdicts` writes on a processor of that class. It says what it holds for; where anything of that
differs, it is not used, and trials are made.
"""

import functools
import json
import logging
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dynamo_backends.interface.plan import Support

log = logging.getLogger("dynamo_backends")

FOLDER = Path(__file__).parent / "shipped"


@dataclass(frozen=True)
class TrialVerdict:
    """How calls of a kind are lowered: natively, decomposed, or in eager.

    Attributes:
        reason: Why they stay in eager; empty: the vendor takes them.
        decomposed: They have to be decomposed first.
    """

    reason: str = ""
    decomposed: bool = False

    @property
    def as_support(self) -> Support:
        """The verdict as an answer of `Backend.supports`."""
        return Support(not self.reason, self.reason, self.decomposed)


@dataclass(frozen=True)
class VerdictConditions:
    """The package versions, CPU and source code that verdicts are valid for.

    Attributes:
        packages: Versions of the vendor's packages.
        torch: Its major and minor version.
        processor: See `processor_class`.
        sources: A digest of the code that decides (see `verdicts.Verdicts`).
    """

    packages: Mapping[str, str]
    torch: str
    processor: str
    sources: str


@functools.cache
def read_verdict_table(
    backend: str, processor: str
) -> tuple[VerdictConditions, dict[str, TrialVerdict]] | None:
    """Reads a backend's verdict table and its conditions; None if there is none.

    Args:
        backend: Name of the vendor's backend.
        processor: See `processor_class`.
    """
    path = _path(backend, processor)
    if not processor or not path.is_file():
        return None
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        return VerdictConditions(**table["holds_for"]), _unpacked(table)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning(
            "the table of operator trial results %s is damaged and is not used: %r", path, error
        )
        return None


def load_shipped_verdicts(backend: str, here: VerdictConditions) -> Mapping[str, TrialVerdict]:
    """Returns a backend's shipped verdicts; empty if they do not apply here.

    Args:
        backend: Name of the vendor's backend.
        here: What there is in this process.
    """
    found = read_verdict_table(backend, here.processor)
    if found is None:
        processor = here.processor or "an unknown processor class"
        log.info("there are no prebuilt operator trial results for %s on %s", backend, processor)
        return {}
    holds_for, verdicts = found
    differs = [n for n, value in asdict(here).items() if value != getattr(holds_for, n)]
    if differs:
        why = ", ".join(differs)
        log.info(
            "the prebuilt operator trial results for %s are not used, because these differ: %s",
            backend,
            why,
        )
        return {}
    return verdicts


def write_verdict_table(
    backend: str, holds_for: VerdictConditions, verdicts: Mapping[str, TrialVerdict]
) -> Path:
    """Writes a backend's verdict table; returns its path.

    Args:
        backend: Name of the vendor's backend.
        holds_for: What the verdicts were found with.
        verdicts: By kinds of calls.
    """
    path = _path(backend, holds_for.processor)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(format_verdict_table(holds_for, verdicts), encoding="utf-8")
    read_verdict_table.cache_clear()
    return path


def _path(backend: str, processor: str) -> Path:
    return FOLDER / backend / f"{processor.replace(' ', '-')}.json"


def format_verdict_table(holds_for: VerdictConditions, verdicts: Mapping[str, TrialVerdict]) -> str:
    """Formats verdicts as sorted JSON text, one kind of call per line."""
    first = min(verdicts)
    settings = first[: first.find(") ") + 2]
    if not all(kind.startswith(settings) for kind in verdicts):
        settings = ""
    groups: dict[str, Any] = {"native": [], "decomposed": [], "eager": defaultdict(list)}
    for kind, verdict in sorted(verdicts.items()):
        name = kind.removeprefix(settings)
        if verdict.reason:
            groups["eager"][verdict.reason].append(name)
        else:
            groups["decomposed" if verdict.decomposed else "native"].append(name)
    groups["eager"] = dict(sorted(groups["eager"].items()))
    table = {"holds_for": asdict(holds_for), "settings": settings, **groups}
    return json.dumps(table, indent=0, ensure_ascii=False) + "\n"


def _unpacked(table: Mapping[str, Any]) -> dict[str, TrialVerdict]:
    settings = table["settings"]
    verdicts = {settings + kind: TrialVerdict() for kind in table["native"]}
    verdicts |= {settings + kind: TrialVerdict(decomposed=True) for kind in table["decomposed"]}
    for reason, kinds in table["eager"].items():
        verdicts |= {settings + kind: TrialVerdict(reason) for kind in kinds}
    return verdicts
