"""What torch's settings admit of GPUs is no alarm; without them it is one."""

import pytest
import torch
from torch import Tensor, fx

from dynamo_backends.graph import precision
from dynamo_backends.graph.precision import Tf32Settings
from dynamo_backends.verify import noise
from tests.verification.test_doubt import compare


def rounded(x: Tensor) -> Tensor:
    """As TF32 has it: ten bits of the mantissa."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def product(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return (x @ y,)


@pytest.mark.parametrize(("allowed", "wrong"), [(True, False), (False, True)])
def test_products_in_tf32_are_right_where_torch_allows_them(
    allowed: bool, wrong: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(noise, "_is_on_gpu", lambda value: value.dtype == torch.float32)
    monkeypatch.setattr(precision, "read_tf32_settings", lambda: Tf32Settings(allowed, False))
    x, y = torch.randn(32, 64), torch.randn(64, 16)
    found = compare(product, [rounded(x) @ rounded(y)], x, y).wrong
    assert bool(found) == wrong, found


def test_a_wrong_product_is_wrong_with_tf32_as_well(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(noise, "_is_on_gpu", lambda value: value.dtype == torch.float32)
    monkeypatch.setattr(precision, "read_tf32_settings", lambda: Tf32Settings(True, True))
    x, y = torch.randn(32, 64), torch.randn(64, 16)
    assert compare(product, [rounded(x) @ rounded(y) * 1.01], x, y).wrong


def test_seeds_on_the_host_are_those_that_torch_promised_on_the_device():
    """`_scaled_dot_product_efficient_attention` without dropout."""
    from dynamo_backends.verify.first_call import OutputMetadata, _Outputs

    promised = OutputMetadata(torch.long, (), torch.device("meta"))
    seed = torch.empty((), dtype=torch.long, device="meta")
    outputs = _Outputs(fx.GraphModule({}, fx.Graph()), [], [promised], False, results=[seed])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dynamo_backends.verify.comparator.is_close", lambda *_: True)
        outputs.compare(0, torch.tensor(0))
    assert outputs.wrong == ""
