"""Graphs for inference on a mesh: what users say of weights and batches, in plain numbers."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from dynamo_backends.aot.step.mesh.parallel import (
    default_batch,
    mesh_of,
    normalize_placement,
    placement_of,
)
from dynamo_backends.graph.graph import Graph, Role
from dynamo_backends.interface.errors import OptionError, did_you_mean
from dynamo_backends.interface.mesh import InputPlacement, Mesh, Placement

log = logging.getLogger("dynamo_backends")

_PLACED = frozenset({Role.PARAMETER, Role.BUFFER})


@dataclass(frozen=True)
class MeshPlacements:
    """Holds a mesh with the placements of weights and batch for inference.

    Attributes:
        mesh: The mesh.
        placements: Of weights, by patterns of their names, the first that matches; all others are
            on each device.
        batch: The default for all other inputs, where it fits.
    """

    mesh: Mesh
    placements: Mapping[str, Placement]
    batch: Placement

    def of_inputs(self, graph: Graph, names: Sequence[str]) -> list[InputPlacement | None]:
        """Returns where the weights of a graph are; None for its other inputs.

        Args:
            graph: For inference.
            names: Names of its inputs.

        Raises:
            OptionError: A placement does not fit its weight, or the graph is none for inference.
        """
        if graph.kind != "inference":
            raise OptionError(
                "options={'mesh': …} supports inference only, but this call computes gradients. "
                "Call the model under torch.no_grad(), or train it with "
                "dynamo_backends.compile_step(..., mesh=…)."
            )
        values = [p.meta["val"] for p in graph.placeholders]
        placed: list[InputPlacement | None] = [None] * len(values)
        for i, given in enumerate(graph.inputs):
            if given.role in _PLACED:
                placed[i] = InputPlacement(names[i], self._of_weight(names[i], values[i].shape))
        self._warn_of_unknown([x.name for x in placed if x is not None])
        return placed

    def _of_weight(self, name: str, shape: Sequence[int]) -> Placement:
        for pattern, placement in self.placements.items():
            if _is_called(name, pattern):
                advice = f"Give {pattern!r} another placement."
                return normalize_placement(
                    placement, shape, self.mesh, f"the weight {name}", advice
                )
        return self.mesh.replicated

    def _warn_of_unknown(self, names: Collection[str]) -> None:
        """A model may be compiled as several graphs, so that none of them has all weights."""
        for pattern in self.placements:
            if names and not any(_is_called(name, pattern) for name in names):
                short = [name.partition(".")[2] for name in names]
                log.warning(
                    "placements names %r, which matches no weight of this graph.%s",
                    pattern, did_you_mean(pattern, [*short, *names]),
                )  # fmt: skip


def _is_called(name: str, pattern: str) -> bool:
    """Returns whether a pattern matches a name of `named_parameters()`."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.partition(".")[2], pattern)


def parse_mesh_options(
    mesh: Any, placements: Mapping[Any, Any], batch: Any
) -> MeshPlacements | None:
    """Parses the options `mesh`, `placements` and `batch_placements`; None: no mesh.

    Raises:
        OptionError: One is not valid.
    """
    if mesh is None:
        for name, value in {"placements": placements, "batch_placements": batch}.items():
            if value:
                raise OptionError(f"option {name!r} needs a mesh: pass 'mesh': {{'model': 4}}")
        return None
    made = mesh if isinstance(mesh, Mesh) else mesh_of(mesh)
    placed = {
        pattern: _plain(given, made, f"placements[{pattern!r}]")
        for pattern, given in placements.items()
    }
    if not batch:
        return MeshPlacements(made, placed, default_batch(made, placed))
    return MeshPlacements(made, placed, _plain(batch, made, "batch_placements"))


def _plain(given: Any, mesh: Mesh, what: str) -> Placement:
    if isinstance(given, tuple) and all(d is None or isinstance(d, int) for d in given):
        return given
    return placement_of(given, mesh, what)
