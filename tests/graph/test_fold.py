"""Batch norms with fixed statistics disappear into the convolution before them."""

import pytest
import torch
from torch import nn

import dynamo_backends
from tests.checking import check


def norm(channels: int, dims: int, **settings: bool) -> nn.Module:
    module = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims](channels, **settings)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.rand_like(tensor) + 0.5)
    return module.eval()


def ops(module: nn.Module, x: torch.Tensor, **options: object) -> int:
    (report,) = check(module.eval(), x, **options)
    return report.ops_on_backend


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_conv_and_batch_norm_become_one(bias: bool, affine: bool, dims: int):
    conv = [nn.Conv1d, nn.Conv2d, nn.Conv3d][dims - 1](4, 8, 3, bias=bias, groups=2)
    module = nn.Sequential(conv, norm(8, dims, affine=affine))
    x = torch.randn(2, 4, *[5] * dims)
    with torch.no_grad():
        folded = ops(module, x)
        kept = ops(module, x, freezing="off")
    assert folded > kept, "the fold's arithmetic on weights replaces the batch norm"


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_transposed_convolutions(groups: int):
    module = nn.Sequential(nn.ConvTranspose2d(4, 8, 3, stride=2, groups=groups), norm(8, 2))
    with torch.no_grad():
        check(module.eval(), torch.randn(2, 4, 5, 5))


def test_a_convolution_with_other_readers_is_left_alone():
    conv, batch_norm = nn.Conv2d(3, 4, 3), norm(4, 2)

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = conv(x)
        return batch_norm(y) + y

    x = torch.randn(2, 3, 6, 6)
    compiled = torch.compile(fn, backend=dynamo_backends.compiler("openxla"))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), fn(x))


def test_training_graphs_are_left_alone():
    module = nn.Sequential(nn.Conv2d(3, 4, 3), norm(4, 2)).eval()
    x = torch.randn(2, 3, 6, 6, requires_grad=True)
    check(module, x)
