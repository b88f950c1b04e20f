"""Measures many cells one after the other, saving each. Each has autotune's whole budget."""

import gc
import time
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dynamo_backends.workers import budget
from harness.cells import EAGER, Cell, Measuring, Row, measure_cell
from harness.ledger import Ledger

ROUNDS = "rounds"
"""What `measure_cell` calls the timing, in place of a backend's name."""

_FIRST_GUESS_S = 60.0


def run_cells(
    todo: Sequence[Cell],
    backends: Sequence[str],
    ledger: Ledger,
    how: Callable[[Sequence[str]], Measuring],
    console: Console,
    *,
    budget_s: float | None = None,
    on_cell: Callable[[Cell, Sequence[Row]], None] = lambda *_: None,
) -> int:
    """Measures cells that the ledger lacks, while there is time.

    Args:
        todo: The cells.
        backends: Names of Dynamo backends.
        ledger: Where results are saved.
        how: How to measure the backends that are left when those that killed the process in this
            cell are taken away.
        console: For the progress bar.
        budget_s: No cell is begun that may end later than so many seconds after the start, but
            always one.
        on_cell: Told of each cell's rows.

    Returns:
        How many cells remain.
    """
    open_cells = [cell for cell in todo if cell not in ledger.results]
    start, longest = time.perf_counter(), 0.0
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=len(todo), completed=len(todo) - len(open_cells))
        for done, cell in enumerate(open_cells):
            used = time.perf_counter() - start
            if budget_s and done and used + (longest or _FIRST_GUESS_S) > budget_s:
                return len(open_cells) - done
            name = f"{cell.model} {cell.mode} {cell.dtype} batch {cell.batch}"

            def step(backend: str, cell: Cell = cell, name: str = name) -> None:
                ledger.begin(cell, backend)
                progress.update(task, description=f"{name}: {backend}")

            longest = max(longest, _run_cell(cell, backends, ledger, how, step))
            on_cell(cell, ledger.results[cell])
            progress.advance(task)
    return 0


def _run_cell(
    cell: Cell,
    backends: Sequence[str],
    ledger: Ledger,
    how: Callable[[Sequence[str]], Measuring],
    step: Callable[[str], None],
) -> float:
    """Measures a cell and saves it; returns the seconds that it took."""
    start = time.perf_counter()
    died = ledger.deadly(cell)
    rows: Sequence[Row] = ()
    if ROUNDS not in died:
        chosen = [name for name in backends if name not in died]
        try:
            rows = measure_cell(cell, chosen, how(chosen), step)
        except Exception as error:  # of eager itself, such as too little memory for the batch
            rows = [Row(EAGER, "failed", error=f"{type(error).__name__}: {error}")]
    seconds = time.perf_counter() - start
    ledger.finish(cell, rows, seconds)
    torch.compiler.reset()
    budget.renew()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return seconds
