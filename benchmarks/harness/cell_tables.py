"""Tables of measured cells, for the terminal and for a page, and whether targets are met."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from dynamo_backends.bench.statistics import geometric_mean
from harness.cells import EAGER, Cell, Row

Results = Mapping[Cell, Sequence[Row]]

AUTOTUNE = "autotune"
OPENXLA_MEAN = 1.29  # what the original TorchDynamo's XLA backend reached on GPUs
CUDAGRAPHS_RATIO = 2.0
AUTOTUNE_OF_BEST = 0.97
OVERHEAD_BOUND = 2.0  # the largest batch takes less than this much longer than the smallest


@dataclass(frozen=True)
class Target:
    """What was aimed at.

    Attributes:
        what: The target, in words.
        found: What was measured; empty if nothing was yet.
        met: Whether it is met; None if it cannot be said yet.
    """

    what: str
    found: str = ""
    met: bool | None = None

    def line(self) -> str:
        """In one line."""
        verdict = {True: "met", False: "NOT met", None: "open"}[self.met]
        return f"{self.what}: {verdict}" + (f" ({self.found})" if self.found else "")


def by_kind(results: Results) -> dict[tuple[str, str, int], dict[str, Sequence[Row]]]:
    """Rows by mode, dtype and batch size, and then by model."""
    found: dict[tuple[str, str, int], dict[str, Sequence[Row]]] = {}
    for cell, rows in results.items():
        found.setdefault((cell.mode, cell.dtype, cell.batch), {})[cell.model] = rows
    return found


def backends_in(models: Mapping[str, Sequence[Row]]) -> list[str]:
    """Names of all backends but eager, in the order in which they occur."""
    names = dict.fromkeys(r.backend for rows in models.values() for r in rows)
    return [n for n in names if n != EAGER]


def cell_text(row: Row | None) -> str:
    """What a table shows of a row: its ratio, or what became of it."""
    if row is None:
        return "-"
    return row.status if row.ratio is None else f"{row.ratio:.2f}"


def with_seconds(row: Row | None) -> str:
    """As `cell_text`, with the seconds of the first call."""
    text = cell_text(row)
    return text if row is None or row.first_call_s is None else f"{text} ({row.first_call_s:.0f} s)"


def lines(
    models: Mapping[str, Sequence[Row]], text: Callable[[Row | None], str] = cell_text
) -> list[list[str]]:
    """A table of texts: a head, a line for each model, and geometric means.

    Args:
        models: Rows by model.
        text: What is shown of a row.
    """
    backends = backends_in(models)
    table = [["model", "eager ms", *backends, "fastest"]]
    for model, rows in models.items():
        found = {r.backend: r for r in rows}
        eager = found.get(EAGER)
        base = f"{eager.ms:.2f}" if eager is not None and eager.ms is not None else "-"
        best = fastest(rows)
        cells = [text(found.get(name)) for name in backends]
        table.append([model, base, *cells, best.backend if best else "-"])
    means = [mean_ratio(models.values(), name) for name in backends]
    shown = ["-" if m is None else f"{m:.2f}" for m in means]
    table.append(["geometric mean", "", *shown, ""])
    return table


def fastest(rows: Iterable[Row], without: Sequence[str] = ()) -> Row | None:
    """The right row with the largest ratio."""
    right = [r for r in rows if r.ratio is not None and r.backend not in without]
    return max(right, key=lambda r: r.ratio or 0.0, default=None)


def mean_ratio(models: Iterable[Sequence[Row]], backend: str) -> float | None:
    """Geometric mean of a backend's ratios; a model that it cannot run right counts as eager."""
    ratios = []
    for rows in models:
        row = next((r for r in rows if r.backend == backend), None)
        if row is not None:
            ratios.append(row.ratio if row.ratio is not None else 1.0)
    return geometric_mean(ratios) if ratios else None


def rich_tables(results: Results, text: Callable[[Row | None], str] = cell_text) -> list[Table]:
    """One table for each mode, dtype and batch size; numbers are speedups over eager.

    Args:
        results: What was measured.
        text: What is shown of a row.
    """
    tables = []
    for (mode, dtype, batch), models in by_kind(results).items():
        title = f"{mode}, {dtype}, batch {batch}: eager's time over the backend's"
        table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False)
        head, *body, means = lines(models, text)
        table.add_column(head[0])
        for name in head[1:]:
            table.add_column(name.replace("_", "_\n"), justify="right", no_wrap=True)
        for line in body:
            table.add_row(*(_marked(text) for text in line))
        table.add_section()
        table.add_row(*means)
        tables.append(table)
    return tables


def _marked(text: str) -> str:
    return f"[bold red]{text}[/]" if text in ("wrong", "failed") else text


def problems(results: Results) -> list[str]:
    """What was wrong or failed, one line each."""
    return [
        f"{cell.model}, {cell.mode}, {cell.dtype}, batch {cell.batch}, {row.backend}: "
        f"{row.status}: {row.error}"
        for cell, rows in results.items()
        for row in rows
        if row.status != "ok"
    ]


def targets(results: Results, expected: int) -> list[Target]:
    """The three targets.

    Args:
        results: What was measured.
        expected: How many models a complete table has.
    """
    return [
        _openxla(results, expected),
        _autotune(results, expected),
        _cudagraphs(results, expected),
    ]


def _openxla(results: Results, expected: int) -> Target:
    what = f"openxla >= {OPENXLA_MEAN} x eager, geometric mean of float32 inference"
    tables = [
        m for k, m in by_kind(results).items() if k[:2] == ("inference", "float32") and len(m)
    ]
    means = [m for t in tables if (m := mean_ratio(t.values(), "openxla")) is not None]
    if not means:
        return Target(what)
    every = [rows for t in tables for rows in t.values()]
    mean = mean_ratio(every, "openxla") or 0.0
    whole = all(len(t) == expected for t in tables)
    found = f"{mean:.2f} over {len(every)} cells"
    return Target(what, found, mean >= OPENXLA_MEAN if whole else None)


def _autotune(results: Results, expected: int) -> Target:
    what = "autotune within 3% of the best candidate on every model"
    shares = {}
    for cell, rows in results.items():
        own = next((r for r in rows if r.backend == AUTOTUNE), None)
        best = fastest(rows, without=(AUTOTUNE,))
        if own is not None and best is not None:
            shares[cell] = (own.ratio or 0.0) / (best.ratio or 1.0)
    if not shares:
        return Target(what)
    worst = min(shares, key=shares.__getitem__)
    found = (
        f"{sum(s >= AUTOTUNE_OF_BEST for s in shares.values())} of {len(shares)} cells; the worst "
        f"is {shares[worst]:.2f}, {worst.model} in {worst.mode}, {worst.dtype}, "
        f"batch {worst.batch}"
    )
    good = all(s >= AUTOTUNE_OF_BEST for s in shares.values())
    whole = all(len(models) == expected for models in by_kind(results).values())
    return Target(what, found, None if good and not whole else good)


def _cudagraphs(results: Results, expected: int) -> Target:
    what = f"cudagraphs >= {CUDAGRAPHS_RATIO:.0f} x eager at batch 1 on overhead-bound models"
    tables = by_kind(results)
    small, large = tables.get(("inference", "float32", 1)), None
    for (mode, dtype, batch), models in tables.items():
        if (mode, dtype) == ("inference", "float32") and batch > 1:
            large = models
    if not small or not large:
        return Target(what)
    names = ("cudagraphs", "cudagraphs_eager")
    if not any(r.backend in names for rows in small.values() for r in rows):
        return Target(what)
    bound = [m for m in small if m in large and _is_overhead_bound(small[m], large[m])]
    ratios = {m: _best_of(small[m], names) for m in bound}
    if not ratios:
        return Target(what, "no model is overhead-bound")
    found = ", ".join(f"{m} {r:.2f}" for m, r in ratios.items())
    whole = len(small) == len(large) == expected
    return Target(
        what, found, all(r >= CUDAGRAPHS_RATIO for r in ratios.values()) if whole else None
    )


def _is_overhead_bound(small: Sequence[Row], large: Sequence[Row]) -> bool:
    times = [next((r.ms for r in rows if r.backend == EAGER), None) for rows in (small, large)]
    return times[0] is not None and times[1] is not None and times[1] < OVERHEAD_BOUND * times[0]


def _best_of(rows: Sequence[Row], names: Sequence[str]) -> float:
    return max((r.ratio or 0.0 for r in rows if r.backend in names), default=0.0)


def markdown(
    results: Results, context: Mapping[str, Any], aims: Sequence[Target], command: str
) -> str:
    """A page with all tables.

    Args:
        results: What was measured.
        context: Of the `Ledger`.
        aims: What was aimed at.
        command: What was run.
    """
    page = [
        "# GPU measurements",
        "",
        f"{machine(context)}. Measured {context['date']} by `{command}`.",
        "",
        "Each number is eager's median time over the backend's, measured in the same rounds; every "
        "result was compared with float64 by the rule of PyTorch's benchmark runners. Training is "
        "forward and backward.",
        "",
        *(f"- {target.line()}" for target in aims),
    ]
    for (mode, dtype, batch), models in by_kind(results).items():
        head, *body = lines(models)
        page += ["", f"## {mode}, {dtype}, batch {batch}", "", _line(head)]
        page += [_line(["---", *["---:"] * (len(head) - 1)]), *(_line(x) for x in body)]
    wrong = problems(results)
    if wrong:
        page += ["", "## Not right", "", *(f"- {text}" for text in wrong)]
    return "\n".join(page) + "\n"


def machine(context: Mapping[str, Any]) -> str:
    """Device, driver and versions in one line."""
    versions = ", ".join(f"{k} {v}" for k, v in context["versions"].items() if v)
    return (
        f"{context['device']}, driver {context['driver'] or 'none'}, "
        f"CUDA {context['cuda'] or 'none'}; {versions}; Python {context['python']}"
    )


def _line(texts: Sequence[str]) -> str:
    return f"| {' | '.join(texts)} |"
