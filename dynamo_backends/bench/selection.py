"""Which cells a command line asks for: of a suite, or of a run that goes on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dynamo_backends.bench import sources
from dynamo_backends.bench.cells import Cell
from dynamo_backends.bench.sources import Case

_DEFAULT_BACKEND = "openxla"


@dataclass(frozen=True)
class Selection:
    """What a command line names of cells; empty where it says nothing.

    Attributes:
        models: Names of models.
        backends: As in `Cell.backend`.
        modes: As in `Cell.mode`.
        dtypes: As in `Cell.dtype`.
        batches: Examples per call.
    """

    models: Sequence[str] = ()
    backends: Sequence[str] = ()
    modes: Sequence[str] = ()
    dtypes: Sequence[str] = ()
    batches: Sequence[int] = ()

    def of(self, known: Sequence[Case], begun: Sequence[Cell] = ()) -> list[Cell]:
        """The cells that are asked for, in the order in which they are measured.

        Args:
            known: The models of the suite.
            begun: Cells of the run that goes on. What is not named is as there: without any name
                they are what is asked for.

        Raises:
            ModelError: There is no model of a given name.
        """
        if self.models:
            sources.named(known, self.models)
        cases = {case.name: case for case in known}
        asked = self._like(begun or [Cell(name, _DEFAULT_BACKEND) for name in cases])
        cells = [
            cell
            for cell in asked
            if cell.model not in cases or sources.has_mode(cases[cell.model], cell.mode)
        ]
        wanted, old = set(cells), set(begun)
        return [*(c for c in begun if c in wanted), *(c for c in cells if c not in old)]

    def _like(self, cells: Sequence[Cell]) -> list[Cell]:
        """Cells with what is named in place of their own, each once; those of a model together."""
        found = [replace(c, backend=name) for c in cells for name in self.backends or [c.backend]]
        named: dict[str, Sequence[Any]] = {
            "model": self.models,
            "batch": self.batches,
            "dtype": self.dtypes,
            "mode": self.modes,
        }
        for field, values in named.items():
            if values:
                found = [replace(cell, **{field: value}) for value in values for cell in found]
            found = list(dict.fromkeys(found))
        return found
