"""Whether a compiled model answers requests as eager does, and how long it takes."""

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dynamo_backends.bench.accuracy import TOLERANCE, compare_outputs
from dynamo_backends.bench.suites.streams import Stream

Serve = Callable[..., Any]
"""Answers a request."""


def difference(
    stream: Stream,
    eager: Serve,
    served: Serve,
    request: Sequence[Any],
    tolerance: float = TOLERANCE,
) -> str:
    """What is wrong with the answer to a request; empty if it is as accurate as eager's.

    Args:
        stream: Of which it is a request.
        eager: Answers in eager.
        served: What is in question.
        request: Its inputs.
        tolerance: Absolute and relative.
    """
    expected, result = eager(*request), served(*request)
    leaves, others = pytree.tree_leaves(expected), pytree.tree_leaves(result)
    if len(leaves) == len(others) and all(map(torch.equal, leaves, others)):
        return ""
    model = copy.deepcopy(stream.model).double()
    precise = stream.serve(model, lambda function: function)(*widened(request))
    found = compare_outputs(expected, result, precise, tolerance)
    return "" if found.passed else found.detail


def widened(request: Sequence[Any]) -> tuple[Any, ...]:
    """The inputs of a request in float64."""
    found: tuple[Any, ...] = pytree.tree_map_only(Tensor, _widened, tuple(request))
    return found


def _widened(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def seconds(serve: Serve, request: Sequence[Any]) -> float:
    """What an answer takes."""
    start = time.perf_counter()
    serve(*request)
    return time.perf_counter() - start


def percentile(latencies: Sequence[float], percent: int) -> float:
    """The latency that so many percent of the answers do not exceed.

    Args:
        latencies: At least one.
        percent: From 1 to 99.
    """
    if len(latencies) == 1:
        return latencies[0]
    return statistics.quantiles(latencies, n=100, method="inclusive")[percent - 1]
