"""A failure as a Python program that anybody can run."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from dynamo_backends.conformance.rewrites.rule import Mismatch
from dynamo_backends.conformance.rewrites.shrinking import Case
from dynamo_backends.conformance.subject import reports_itself
from dynamo_backends.interface.errors import brief_error


def in_words(failure: Mismatch | Exception) -> str:
    """What fails, in a line."""
    return brief_error(failure) if isinstance(failure, Exception) else str(failure)


def example(case: Case, backend: str, failure: str) -> str:
    """A program that compiles a graph, calls it with usual values, and shows what fails then.

    Args:
        case: The graph and its inputs.
        backend: See `bench.backends.require`.
        failure: What fails, in words.
    """
    graph, names = case.graph, ", ".join(x.name for x in case.graph.inputs)
    usual = ", ".join(_usual(x.shape, x.dtype, x.size) for x in graph.inputs)
    imports, compiler = _backend(backend)
    if "F." in graph.source():
        imports.insert(0, "import torch.nn.functional as F")
    lines = [
        "import torch",
        *imports,
        "",
        graph.source(),
        "",
        f"compiled = torch.compile(f, {compiler})",
        f"compiled({usual})  # usual values",
        *(f"{x.name} = {_constant(case.values[x.name])}" for x in graph.inputs),
        f"print('eager   ', [y.tolist() for y in f({names})])",
        f"print('compiled', [y.tolist() for y in compiled({names})])",
        f"# {' '.join(failure.split())}",
    ]
    return "\n".join(lines) + "\n"


def _backend(name: str) -> tuple[list[str], str]:
    """What is imported for a backend, and arguments of `torch.compile`."""
    place, _, function = name.rpartition(":")
    if place.endswith(".py"):
        path = Path(place)
        lines = ["import sys", "", f"sys.path.insert(0, {str(path.parent)!r})"]
        return [*lines, f"from {path.stem} import {function}"], f"backend={function}"
    if place:
        return [f"from {place} import {function}"], f"backend={function}"
    options = ', options={"min_block_size": 1}' if reports_itself(name) else ""
    return [], f'backend="{name}"{options}'


def _constant(x: Tensor) -> str:
    text = str(x.tolist()).replace("nan", 'float("nan")').replace("inf", 'float("inf")')
    return f"torch.tensor({text}, dtype={x.dtype})"


def _usual(shape: Sequence[int], dtype: torch.dtype, positions: int) -> str:
    size = list(shape)
    if positions or dtype == torch.bool:
        return f"torch.zeros({size}, dtype={dtype})"
    if dtype.is_floating_point:
        return f"torch.randn({size}, dtype={dtype})"
    return f"torch.ones({size}, dtype={dtype})"
