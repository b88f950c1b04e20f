"""What programs for a range of sizes are given, and what they return."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.symbolic_sizes import with_sizes_as_inputs
from dynamo_backends.interface.errors import CompileError
from dynamo_backends.runtime.ranged_calls import RangedLayout, require_nonempty
from tests.graph.test_sizes import graphs_of, split


def columns(x: Tensor) -> Tensor:
    return x.t().contiguous().t() * 2


def ranged(fn: Callable[..., Any], rows: int = 3) -> Graph:
    (graph,) = graphs_of(fn, torch.randn(rows, 8))
    return graph


def test_memory_of_results_is_in_the_order_of_torch():
    layout = RangedLayout(ranged(columns))
    x = torch.randn(5, 6)
    numbers = layout.numbers([x])
    (memory,) = layout.allocate_outputs(numbers)
    assert memory.shape == (6, 5)
    memory.copy_((x * 2).t())
    layout.require_shapes([memory], numbers, "TVM")
    (result,) = layout.export_results([memory], numbers)
    torch.testing.assert_close(result, columns(x))
    assert result.stride() == columns(x).stride()


def test_a_result_of_another_shape_is_an_error():
    layout = RangedLayout(ranged(columns))
    x = torch.randn(5, 6)
    numbers = layout.numbers([x])
    with pytest.raises(RuntimeError, match=r"TVM's program gives \[5, 6\] instead of \[6, 5\]"):
        layout.require_shapes([x], numbers, "TVM")


def test_sizes_that_a_program_is_given_come_first():
    graph = ranged(split)
    sizes = with_sizes_as_inputs(graph)[1]
    layout = RangedLayout(graph, sizes)
    numbers = layout.numbers([torch.randn(5, 12)])
    assert (sizes, numbers[0]) == ([3], 5)
    (memory,) = layout.allocate_outputs(numbers)
    assert memory.shape == (5, 6)


def test_a_tensor_that_may_have_no_elements_is_refused():
    require_nonempty(ranged(split))
    graph = ranged(lambda x: x[2:] * 2, rows=6)
    with pytest.raises(CompileError, match=r"'slice.*' may have no elements"):
        require_nonempty(graph)
    require_nonempty(graph, lambda node: True)
