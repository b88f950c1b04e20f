"""1×1 convolutions with batch norm read torch's own weights."""

import pytest
import torch
from torch import nn

import dynamo_backends
from tests.checking import check


def block(conv: nn.Module, channels: int) -> nn.Module:
    """A convolution with batch norm, whose statistics are not those of a new layer."""
    norm = {3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[conv.weight.ndim](channels)
    nn.init.uniform_(norm.running_var, 0.5, 2)
    for values in (norm.running_mean, norm.weight, norm.bias):
        nn.init.normal_(values)
    return nn.Sequential(conv, norm, nn.ReLU()).eval()


CASES = {
    "1x1": (lambda: nn.Conv2d(6, 8, 1, bias=False), (2, 6, 5, 5), True),
    "with a bias": (lambda: nn.Conv2d(6, 8, 1), (2, 6, 5, 5), True),
    "stride and padding": (lambda: nn.Conv2d(6, 8, 1, stride=2, padding=1), (2, 6, 5, 5), True),
    "one dimension": (lambda: nn.Conv1d(6, 8, 1), (2, 6, 5), True),
    "float64": (lambda: nn.Conv2d(6, 8, 1).double(), (2, 6, 5, 5), True),
    "3x3": (lambda: nn.Conv2d(6, 8, 3), (2, 6, 5, 5), False),
    "groups": (lambda: nn.Conv2d(6, 8, 1, groups=2), (2, 6, 5, 5), False),
    "transposed": (lambda: nn.ConvTranspose2d(6, 8, 1), (2, 6, 5, 5), False),
}


@pytest.mark.parametrize("name", CASES)
def test_weights_are_shared_where_that_is_free(name: str):
    make, shape, shares = CASES[name]
    torch.manual_seed(0)
    conv = make()
    model = block(conv, 8).to(conv.weight.dtype)
    x = torch.randn(shape, dtype=conv.weight.dtype)
    with torch.no_grad():
        (report,) = check(model, x, cache=False)
    (used,) = report.executable.static_program.blocks
    read = {used.executable._weights[i].shape for i in used.executable.wiring.untouched}
    assert (tuple(conv.weight.shape) in read) == shares


def test_a_write_that_no_check_sees_is_seen():
    model = block(nn.Conv2d(64, 64, 1), 64)
    compiled = torch.compile(model, backend=dynamo_backends.compiler("openxla", cache=False))
    x = torch.randn(2, 64, 4, 4)
    with torch.no_grad(), dynamo_backends.record() as reports:
        compiled(x)
        model[0].weight.data.view(-1)[1000::97] += 3
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    assert sum(r.rebinds for r in reports) == 0
