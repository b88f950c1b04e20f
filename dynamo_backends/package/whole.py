"""A model that is one executable: what other runtimes can be given of it."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface.backend import Backend
from dynamo_backends.interface.errors import SaveError
from dynamo_backends.interface.executable import Executable
from dynamo_backends.package.capturing import Captured, compiled
from dynamo_backends.package.packaged import InMemoryParts, PackageBackend
from dynamo_backends.package.structure import decoded
from dynamo_backends.runtime.program import Block, LiteralOutput, Program


@dataclass(frozen=True)
class Whole:
    """Holds a compiled model whose whole graph is one executable.

    Attributes:
        graph: What was compiled.
        executable: Executable of the graph.
        weights: Those of the graph, by position.
        places: For each activation of the graph its position among all inputs of the model's graph.
        input_names: Of the activations.
        output_names: Of the outputs; those of the model that are None are none of the graph.
    """

    graph: Graph
    executable: Executable
    weights: dict[int, Tensor]
    places: tuple[int, ...]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]

    def activations(self, values: Sequence[Any]) -> list[Any]:
        """Returns what the graph is given, of all inputs of the model's graph."""
        return [values[place] for place in self.places]


def whole(found: Captured, inner: Backend) -> Whole:
    """Compiles a model as one executable.

    Args:
        found: The model.
        inner: What compiles it.

    Raises:
        SaveError: It is several, or has parts in eager.
    """
    backend = _Noting(inner)
    (report,) = compiled(found, backend).reports
    program = getattr(report.executable, "only_program", None)
    if not isinstance(program, Program):
        raise SaveError(
            "no single program supports all sizes. Give minimum and maximum sizes in "
            "dynamic_shapes."
        )
    if len(program.blocks) != 1 or report.ops_in_eager or len(backend.noted) != 1:
        reasons = "; ".join(f"{f.op}: {f.reason}" for f in report.fallbacks)
        raise SaveError(
            f"the model cannot be compiled as one program ({reasons or 'it falls into parts'})."
        )
    (step,) = (step for step in program.steps if isinstance(step.run, Block))
    is_there = [x != LiteralOutput(None) for x in program.outputs]
    if step.writes != tuple(itertools.compress(program.outputs, is_there)):
        raise SaveError(
            "a result is an argument of the model or a Python scalar. Return a copy (clone()) of "
            "the argument, and no scalars."
        )
    ((graph, executable),) = backend.noted
    reads = list(step.read(range(program.registers)))
    names = [place.name for place in found.portable.places]
    tensors = dict(enumerate(found.values)) | dict(enumerate(program.constants, len(names)))
    return Whole(
        graph,
        executable,
        {i: tensors[reads[i]] for i in graph.weights},
        tuple(reads[i] for i in graph.activations),
        tuple(names[reads[i]] for i in graph.activations),
        tuple(itertools.compress(_output_names(decoded(found.contents.results)), is_there)),
    )


class _Noting(PackageBackend):
    """A backend that notes what it compiles."""

    def __init__(self, inner: Backend):
        super().__init__(inner, InMemoryParts(), {})
        self.noted: list[tuple[Graph, Executable]] = []

    def compile(self, graph: Graph, options: Any) -> Executable:
        """See `Backend.compile`."""
        copy = graph.copy()
        made = super().compile(graph, options)
        self.noted.append((copy, made))
        return made


def _output_names(results: Any) -> list[str]:
    """Keys of mappings, joined; "output_0", ... where there are none."""
    names = []
    for i, (path, _) in enumerate(pytree.tree_flatten_with_path(results)[0]):
        keys = [str(getattr(key, "key", getattr(key, "idx", ""))) for key in path]
        named = any(not key.isdecimal() for key in keys)
        names.append("_".join(keys) if named else f"output_{i}")
    return names
