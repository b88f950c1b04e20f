"""What a captured step has that its backend cannot take, said so that a user can mend it."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dynamo_backends.aot.step.program.recording import WHAT_TO_DO
from dynamo_backends.graph.graph import Graph, source_line
from dynamo_backends.interface.errors import DynamoBackendsError, StepCaptureError, first_line

_WITH_SPARSE = ("aot_eager",)


def refuse_sparse(graph: Graph, backend: str) -> None:
    """Refuses sparse tensors, such as gradients of `nn.Embedding(sparse=True)`.

    Raises:
        StepCaptureError: There are some, and the backend has none.
    """
    if backend in _WITH_SPARSE:
        return
    for node in graph.calls:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and value.layout is not torch.strided:
            where = source_line(node)
            raise StepCaptureError(
                f"{backend} has no sparse tensors, which the step makes"
                + (f" at {where}" if where else "")
                + ". Use nn.Embedding(sparse=False), whose gradients are dense, the backend "
                '"aot_eager", or fallback="split".'
            )


def refuse_shared_writes(
    graph: Graph, names: Sequence[str], batch: Sequence[Any], groups: Sequence[Sequence[int]]
) -> None:
    """Refuses writes to an argument that overlaps with another one.

    Args:
        graph: Of the step.
        names: Of its first inputs.
        batch: The leaves of the arguments.
        groups: See `arguments.shared_memory`.

    Raises:
        StepCaptureError: There is one.
    """
    inputs = dict(zip(names, graph.inputs, strict=False))
    for group in groups:
        places = dict.fromkeys(group)
        written = [i for i in places if inputs[f"batch[{i}]"].updated_by is not None]
        if written and len({id(batch[i]) for i in places}) > 1:
            several = ", ".join(f"batch[{i}]" for i in places)
            raise StepCaptureError(
                f"the step writes to batch[{written[0]}], and {several} share memory, which one "
                "graph cannot hold. Pass a copy (clone()), or write to a copy in the function."
            )


@contextlib.contextmanager
def refused_by(backend: str) -> Iterator[None]:
    """Inside: what fails while a captured step is compiled is a refusal, with a way out."""
    try:
        yield
    except DynamoBackendsError:
        raise
    except Exception as error:
        raise StepCaptureError(
            f"{backend} cannot compile the step: {type(error).__name__}: {first_line(error)} "
            + WHAT_TO_DO
        ) from error
