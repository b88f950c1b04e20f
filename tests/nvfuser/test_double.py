"""The double refuses what nvFuser refuses, and what nvFuser would decide on its own."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.nvfuser import double
from tests.nvfuser.double import FusionError


@pytest.fixture
def nvf() -> Iterator[Any]:
    with double.installed() as module:
        yield module


def matrix(nvf: Any, fd: Any, dtype: str = "Float", shape: tuple[int, ...] = (-1, -1)) -> Any:
    """An input in row-major order."""
    flags = [None if n == 1 else True for n in shape]
    order = list(range(len(shape)))[::-1]
    return fd.define_tensor(list(shape), flags, getattr(nvf.DataType, dtype), stride_order=order)


def run(nvf: Any, define: Callable[[Any], Any], *inputs: torch.Tensor) -> list[torch.Tensor]:
    fd = nvf.FusionDefinition()
    with fd:
        for result in define(fd):
            fd.add_output(result)
    return fd.execute(list(inputs))


def test_it_computes(nvf: Any):
    def define(fd: Any) -> list[Any]:
        x = matrix(nvf, fd)
        half = fd.define_scalar(0.5, dtype=nvf.DataType.Float)
        mean = fd.ops.sum(fd.ops.mul(x, half), [1])
        return [fd.ops.add(x, fd.ops.broadcast(mean, [False, True])), fd.ops.exp(mean)]

    x = torch.randn(3, 4)
    shifted, exp = run(nvf, define, x)
    torch.testing.assert_close(shifted, x + x.sum(1, keepdim=True) / 2)
    torch.testing.assert_close(exp, (x.sum(1) / 2).exp())


WRONG: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "ranks": (lambda nvf, fd: fd.ops.add(matrix(nvf, fd), matrix(nvf, fd, shape=(-1,))), "ranks"),
    "types": (lambda nvf, fd: fd.ops.add(matrix(nvf, fd), matrix(nvf, fd, "Double")), "types"),
    "a half": (lambda nvf, fd: fd.ops.exp(matrix(nvf, fd, "Half")), "type Half"),
    "a plain number": (lambda nvf, fd: fd.ops.add(matrix(nvf, fd), 1.0), "is no value"),
    "squeezing": (lambda nvf, fd: fd.ops.squeeze(matrix(nvf, fd), [0]), "non-broadcasting"),
    "no dimension": (lambda nvf, fd: fd.ops.sum(matrix(nvf, fd), []), "along no dimension"),
    "negative dimension": (lambda nvf, fd: fd.ops.sum(matrix(nvf, fd), [-1]), "of 2 dimensions"),
    "short permutation": (lambda nvf, fd: fd.ops.permute(matrix(nvf, fd), [0]), "permuted by"),
    "a wide constant": (
        lambda nvf, fd: fd.define_scalar(2**40, dtype=nvf.DataType.Int32), "no 32 bit integer"
    ),
    "a float that is none": (
        lambda nvf, fd: fd.define_scalar(1, dtype=nvf.DataType.Float), "no constant of type Float"
    ),
    "a foreign type": (
        lambda nvf, fd: fd.define_scalar(1, dtype=torch.int64), "no DataType"
    ),
    "a gap in the flags": (
        lambda nvf, fd: fd.define_tensor([1], [True], nvf.DataType.Float, stride_order=[0]),
        "is broadcast",
    ),
    "a size": (
        lambda nvf, fd: fd.define_tensor([3], [True], nvf.DataType.Float, stride_order=[0]),
        "wrong shape",
    ),
    "an input as an output": (
        lambda nvf, fd: fd.add_output(matrix(nvf, fd)), "returned as an output"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_wrong_definitions_are_refused(nvf: Any, what: str):
    define, text = WRONG[what]
    fd = nvf.FusionDefinition()
    with fd, pytest.raises(FusionError, match=text):
        define(nvf, fd)


def test_outputs_are_added_once(nvf: Any):
    fd = nvf.FusionDefinition()
    with fd:
        y = fd.ops.exp(matrix(nvf, fd))
        fd.add_output(y)
        with pytest.raises(FusionError, match="added twice"):
            fd.add_output(y)


def test_an_operation_that_nvfuser_does_not_have(nvf: Any):
    fd = nvf.FusionDefinition()
    with fd, pytest.raises(AttributeError, match="no operation 'flip'"):
        fd.ops.flip(matrix(nvf, fd), [0])


def test_a_definition_is_closed_before_it_runs_and_then_stays_so(nvf: Any):
    fd = nvf.FusionDefinition()
    with pytest.raises(FusionError, match="not closed"):
        fd.execute([])
    with fd:
        x = matrix(nvf, fd)
        fd.add_output(fd.ops.exp(x))
    with pytest.raises(FusionError, match="completed definition"):
        fd.define_scalar(1.0, dtype=nvf.DataType.Float)


def test_values_belong_to_one_definition(nvf: Any):
    first, second = nvf.FusionDefinition(), nvf.FusionDefinition()
    with first:
        x = matrix(nvf, first)
    with second, pytest.raises(FusionError, match="another definition"):
        second.add_output(second.ops.exp(x))


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (torch.zeros(3, 4, dtype=torch.float64), "its type is not Float"),
        (torch.zeros(3), "its rank is wrong"),
        (torch.zeros(3, 1), "size 1 and was not defined so"),
        (torch.zeros(4, 3).t(), "order of strides|not contiguous"),
        (torch.zeros(3, 8)[:, ::2], "not contiguous"),
        (torch.zeros(3, 1).expand(3, 4), "is broadcast"),
        (torch.zeros(0, 4), "no elements"),
    ],
)
def test_inputs_have_to_be_what_was_defined(nvf: Any, x: torch.Tensor, text: str):
    with pytest.raises(FusionError, match=text):
        run(nvf, lambda fd: [fd.ops.exp(matrix(nvf, fd))], x)


def test_only_broadcast_dimensions_are_broadcast(nvf: Any):
    def define(fd: Any) -> list[Any]:
        return [fd.ops.add(matrix(nvf, fd), matrix(nvf, fd, shape=(-1, 1)))]

    x, column = torch.randn(3, 4), torch.randn(3, 1)
    torch.testing.assert_close(run(nvf, define, x, column)[0], x + column)
    with pytest.raises(FusionError, match="in dimension 0"):
        run(nvf, define, x, torch.randn(2, 1))


def test_what_is_only_moved_is_a_view():
    with double.installed() as nvf:
        x = torch.randn(3, 4)
        (result,) = run(nvf, lambda fd: [fd.ops.set(matrix(nvf, fd))], x)
        assert result.data_ptr() == x.data_ptr()
