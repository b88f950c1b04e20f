"""What torch promises beyond values: mutation, views, strides, dtypes, shapes, gradients."""

import pytest
import torch

import dynamo_backends
from tests.backend_checks import (
    SEMANTICS,
    agree,
    follows_the_batch,
    gradients_agree,
    ran_on_backend,
    threads_agree,
)
from tests.checking import check

IN_EAGER = {"conjugated"}  # TVM does not compute with complex numbers


@pytest.mark.parametrize("name", SEMANTICS)
def test_semantics(name: str):
    fn, make = SEMANTICS[name]
    reports = agree("tvm", fn, *make(), min_block_size=1)
    assert ran_on_backend(reports) or name in IN_EAGER, [r.fallbacks for r in reports]


def test_a_dynamic_batch():
    follows_the_batch("tvm")


def test_gradients():
    gradients_agree("tvm")


def test_random_numbers_equal_eagers():
    def fn(x: torch.Tensor) -> torch.Tensor:
        a = torch.nn.functional.dropout(x * 2, 0.5, training=True)
        return torch.nn.functional.dropout(a + torch.rand_like(x), 0.3, training=True)

    check(fn, torch.randn(3, 4), ops_in_eager=None, backend="tvm")


def test_a_result_that_is_an_input_once_optimised_has_memory_of_its_own():
    def fn(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.clone(), y + x, y.clone().view(6), (x + 0).reshape(3, 2)

    x, y = torch.randn(2, 3), torch.randn(2, 3)
    check(fn, x, y, backend="tvm", min_block_size=1, ops_in_eager=None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_products_in_other_precisions(dtype: torch.dtype):
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.addmm(y[0], x, y) * 2 - 1

    check(fn, torch.randn(4, 33, dtype=dtype), torch.randn(33, 33, dtype=dtype), backend="tvm")


def test_indices_from_the_end_and_masks():
    index = torch.tensor([[0, -1], [2, -3]])

    def fn(x: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x[:, index], x[index[0], index[1]], table[index.abs()], x.masked_fill(x > 0, -1.0)

    check(fn, torch.randn(4, 5), torch.randn(9, 3), backend="tvm", ops_in_eager=None)


def test_indices_out_of_range_raise_as_in_eager():
    """TVM would read whatever memory there is."""
    table = torch.zeros(4, 3)
    compiled = torch.compile(lambda t, i: torch.embedding(t, i) * 1 + 0, backend="tvm")
    compiled(table, torch.tensor([0, 3]))
    with pytest.raises(IndexError, match="index out of range in self"):
        compiled(table, torch.tensor([10**9, -(10**9)]))


def test_threads_can_share_a_compiled_function():
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    compiled = torch.compile(module.eval(), backend=dynamo_backends.compiler("tvm"))
    with torch.no_grad():
        compiled(torch.randn(4, 8))
    threads_agree(compiled, module, 4, 8)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: x + y,
        lambda x, y: x - y,
        lambda x, y: x * y,
        lambda x, y: -x,
        lambda x, y: x.abs(),
        lambda x, y: x * 7,
        lambda x, y: 5 - x,
        lambda x, y: x**2,
        lambda x, y: x.square(),
    ],
)
def test_int32_begins_again_at_the_other_end_in_wider_loops(fn):
    most = 2**31 - 1
    x = torch.tensor([most, most, 3, -most - 1, 5, 100_000], dtype=torch.int32)
    y = torch.tensor([most, -2, 3, -1, 1, 100_000], dtype=torch.int32)

    def wider(x, y):
        return fn(x, y).long() * 3 + 1

    check(wider, x, y, backend="tvm", min_block_size=1, verify="off")
