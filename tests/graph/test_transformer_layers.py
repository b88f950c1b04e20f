"""The operators of torch's transformer modules in evaluation mode, taken apart."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends.graph.decomposition_tables import all_decomposition_rules
from dynamo_backends.verify import describe_difference, widen_to_float64
from tests.backend_checks import agree, ran_on_backend, usable

ENCODER = torch.ops.aten._transformer_encoder_layer_fwd.default
ATTENTION = torch.ops.aten._native_multi_head_attention.default

HIDDEN = torch.zeros(2, 5, dtype=torch.bool)
HIDDEN[0, 3:] = True
LATER = torch.ones(5, 5, dtype=torch.bool).triu(1)
MASKS: dict[str, tuple[Tensor | None, int | None]] = {
    "none": (None, None),
    "later keys": (LATER, 0),
    "keys": (HIDDEN, 1),
    "of scores": (LATER.expand(2, 4, 5, 5), 2),
    "numbers": (torch.where(HIDDEN, -torch.inf, 0.0), 1),
    "all keys": (torch.ones(2, 5, dtype=torch.bool), 1),
}


def weights_of(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for shape in shapes]


def check(op: Any, args: tuple[Any, ...]) -> None:
    """Compares the rule of an operator with the operator."""

    def results(function: Any, given: tuple[Any, ...]) -> list[Tensor | None]:
        found = function(*given)
        return list(found) if isinstance(found, tuple) else [found]

    expected = results(op, args)
    found = results(all_decomposition_rules()[op], args)
    precise = results(op, tuple(widen_to_float64(x) if isinstance(x, Tensor) else x for x in args))
    assert describe_difference(expected, found, precise) is None
    layouts = [[(x.dtype, x.stride()) for x in y if x is not None] for y in (found, expected)]
    assert layouts[0] == layouts[1]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("use_gelu", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_the_encoder_layer(mask: str, use_gelu: bool, norm_first: bool):
    src, *weights = weights_of((2, 5, 16), (48, 16), (48,), (16, 16), (16,))
    norms = weights_of((16,), (16,), (16,), (16,))
    linear = weights_of((24, 16), (24,), (16, 24), (16,))
    how = (use_gelu, norm_first, 1e-5)
    check(ENCODER, (src, 16, 4, *weights, *how, *norms, *linear, *MASKS[mask]))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("need_weights", "mean"), [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("is_same", [True, False])
def test_attention_of_many_heads(mask: str, need_weights: bool, mean: bool, is_same: bool):
    query, key, value, *weights = weights_of(*[(2, 5, 16)] * 3, (48, 16), (48,), (16, 16), (16,))
    given = (query, query, query) if is_same else (query, key, value)
    kind, number = MASKS[mask]
    check(ATTENTION, (*given, 16, 4, *weights, kind, need_weights, mean, number))


def test_other_devices_keep_the_operators():
    src, *weights = weights_of((2, 5, 16), (48, 16), (48,), (16, 16), (16,))
    given = (src, src, src, 16, 4, *weights)
    moved = [x.to("meta") if isinstance(x, Tensor) else x for x in given]
    assert all_decomposition_rules()[ATTENTION](*moved) is NotImplemented


@pytest.mark.parametrize("name", ["openxla", "onnxrt", "ov", "iree", "tvm"])
def test_an_encoder_runs_whole(name: str):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 24, activation="gelu", batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    with torch.no_grad():
        assert ran_on_backend(agree(usable(name), model, torch.randn(2, 5, 16)))


@pytest.mark.parametrize("name", ["onnxrt", "ov"])
def test_one_program_serves_all_lengths(name: str):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True).eval()
    if torch.__version__.startswith("2.11."):
        pytest.skip("torch 2.11's Dynamo captures nothing of this layer if sizes are symbols")
    compiled = torch.compile(layer, backend=usable(name), dynamic=True)
    with torch.no_grad(), dynamo_backends.record() as reports:
        for length in (5, 7, 11):
            x = torch.randn(2, length, 16)
            torch.testing.assert_close(compiled(x), layer(x))
    assert [[served.by for served in report.traffic()] for report in reports] == [["ranged"]]
