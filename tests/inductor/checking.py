"""What the tests of kernels check of a compiled module."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from dynamo_backends._torch_private import meets_benchmark_accuracy

EXACT = {"ranges": False}
"""Options with which every set of sizes is compiled for itself, with the kernels that suit it."""


def check(module: nn.Module, x: Tensor, options: dict[str, Any] | None = None) -> Any:
    """Compiles by inductor_freezing, compares results and strides with eager's.

    Returns:
        The compiled module.
    """
    module = module.eval()
    compiled = torch.compile(module, backend="inductor_freezing", options=options)
    with torch.no_grad():
        expected, found = module(x), compiled(x)
        assert meets_benchmark_accuracy(
            expected, found, copy.deepcopy(module).double()(x.double()), tol=1e-4
        )
    assert found.stride() == expected.stride()
    return compiled
