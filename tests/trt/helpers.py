"""What the tests of TensorRT share."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends import GraphReport
from dynamo_backends.trt.runtime import TensorRTExecutable


def net() -> nn.Module:
    """Two products, whose weights the engine has as they are."""
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


def compiled(
    function: Any, *inputs: Tensor, dynamic: bool | None = None, **options: Any
) -> tuple[Callable[..., Any], GraphReport]:
    """A compiled function that ran once, and its report."""
    backend = dynamo_backends.compiler("tensorrt", **options)
    run = torch.compile(function, backend=backend, dynamic=dynamic)
    with torch.no_grad(), dynamo_backends.record() as reports:
        run(*inputs)
    return run, reports[0]


def executable(report: GraphReport) -> TensorRTExecutable:
    """The only executable of a graph with static shapes."""
    (block,) = report.executable.static_program.blocks
    return block.executable


def reasons(reports: list[GraphReport]) -> dict[str, str]:
    """Why operators run in eager."""
    return {f.op: f.reason for r in reports for f in r.fallbacks}
