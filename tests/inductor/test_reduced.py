"""`precision="bf16"`: what is computed in bfloat16, and how exact it is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from dynamo_backends.autotune.verification import autocast_bfloat16
from dynamo_backends.inductor.reduced import compute_in_bfloat16
from dynamo_backends.kernels.patterns import skip_bfloat16_cast
from dynamo_backends.verify.comparator import relative_error

aten = torch.ops.aten
BFLOAT16 = {"precision": "bf16"}


def reduced(function: Callable[..., Any], *inputs: Tensor) -> tuple[fx.GraphModule, bool]:
    """A function's graph after the pass, and whether that changed it."""
    module = make_fx(function, tracing_mode="fake")(*inputs)
    return module, compute_in_bfloat16(module)


def types(module: fx.GraphModule, target: Any) -> list[torch.dtype]:
    nodes = module.graph.find_nodes(op="call_function", target=target)
    assert nodes
    return [node.meta["val"].dtype for node in nodes]


def test_products_and_what_follows_them_are_reduced_and_normalizations_are_not():
    image, weight, shift = torch.randn(2, 4, 8, 8), torch.randn(4, 4, 3, 3), torch.randn(4)

    def function(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        y = F.conv2d(x, w, b, padding=1).relu()
        y = F.max_pool2d(y + F.conv2d(y, w, padding=1), 2)
        z = torch.cat((y, y * 2), 1).flatten(1)
        return y, z @ z.mT, z.softmax(1), y + x[:, :, :4, :4]

    module, changed = reduced(function, image, weight, shift)
    assert changed
    for target in (aten.convolution.default, aten.relu.default, aten.cat.default, aten.mm.default):
        assert set(types(module, target)) == {torch.bfloat16}
    assert types(module, aten._softmax.default) == [torch.float32]
    assert types(module, aten.add.Tensor) == [torch.bfloat16, torch.float32], "x is float32"
    expected = function(image, weight, shift)
    for e, r in zip(expected, module(image, weight, shift), strict=True):
        assert r.dtype == e.dtype
        assert 0 < relative_error([e.double()], [r]) < 0.02


def test_what_is_cast_is_cast_once():
    module, _ = reduced(lambda x: (x @ x, x @ x.relu(), x.mT @ x), torch.randn(4, 4))
    casts = module.graph.find_nodes(
        op="call_function", target=torch.ops.prims.convert_element_type.default
    )
    sources = [(node.args[0].name, node.args[1]) for node in casts]
    assert len(set(sources)) == len(sources)
    (first, *_) = casts
    assert skip_bfloat16_cast(first).op == "placeholder"
    assert skip_bfloat16_cast(skip_bfloat16_cast(first)) is skip_bfloat16_cast(first)


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda x: x @ x, torch.randn(4, 4, dtype=torch.float64)),
        (lambda x: x @ x, torch.randn(4, 4, dtype=torch.complex64)),
        (lambda x: x @ x, torch.randint(9, (4, 4))),
        (lambda x: x.softmax(0) * 2, torch.randn(4, 4)),
    ],
    ids=["float64", "complex", "integers", "no products"],
)
def test_everything_else_stays(function: Callable[..., Any], x: Tensor):
    module, changed = reduced(function, x)
    assert not changed
    assert torch.equal(module(x), function(x))


def test_a_scalar_tensor_does_not_widen():
    module, _ = reduced(lambda x, s: (x @ x) * s, torch.randn(4, 4), torch.tensor(2.0))
    assert types(module, aten.mul.Tensor) == [torch.bfloat16]


class Convolutions(nn.Module):
    """Two with normalizations, a residual, pools, a classifier and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), nn.BatchNorm2d(64), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(64, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64))
        self.last = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.first(x), 3, 2, 1)
        x = (self.second(x) + x).relu()
        return self.last(x.mean((2, 3)))


class Attention(nn.Module):
    """Attention, with a mask as transformers make it or without one."""

    def __init__(self, **settings: Any):
        super().__init__()
        self.project = nn.Linear(32, 96)
        self.settings = settings

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x).unflatten(2, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        if mask is not None:
            low = (1 - mask)[:, None, None, :] * torch.finfo(torch.float32).min
            mask = low.expand(-1, 1, x.shape[1], -1)
        y = F.scaled_dot_product_attention(q, k, v, mask, **self.settings)
        return y.transpose(1, 2).flatten(2) + 1


def masked() -> tuple[nn.Module, list[Tensor]]:
    mask = torch.ones(3, 10)
    mask[1, 4:] = 0
    mask[2] = 0  # all least numbers: torch attends to everything
    return Attention(), [torch.randn(3, 10, 32), mask]


MODELS: dict[str, Callable[[], tuple[nn.Module, list[Tensor]]]] = {
    "convolutions": lambda: (Convolutions(), [torch.randn(4, 3, 48, 48)]),
    "attention": lambda: (Attention(), [torch.randn(3, 10, 32)]),
    "causal attention": lambda: (Attention(is_causal=True), [torch.randn(3, 10, 32)]),
    "attention with a mask": masked,
    "lstm": lambda: (nn.LSTM(8, 16, batch_first=True), [torch.randn(2, 5, 8)]),
}


def under_autocast(module: nn.Module, inputs: list[Tensor]) -> Any:
    """A module's results in bfloat16; None if torch's LSTM refuses it on this processor."""
    with autocast_bfloat16():
        try:
            return module(*inputs)
        except RuntimeError:  # oneDNN has no such kernel for it
            if not isinstance(module, nn.LSTM):
                raise
            return None


@pytest.mark.parametrize("choice", ["whole", "products"])
@pytest.mark.parametrize("name", MODELS)
def test_results_are_about_as_exact_as_under_autocast(
    name: str, choice: str, monkeypatch: pytest.MonkeyPatch
):
    asked: list[str] = []

    def fastest(kind: str, usual: str, make: Callable[[], Any], layouts: Any, **_: Any) -> str:
        inputs = [torch.randn(shape, dtype=dtype) for shape, _, dtype in layouts]
        shapes = [run(inputs)[0].numel() for run in make().values()]
        assert len(set(shapes)) == 1
        asked.append(kind)
        return choice

    monkeypatch.setattr("dynamo_backends.inductor.reduced.fastest", fastest)
    torch.manual_seed(0)
    module, inputs = MODELS[name]()
    module = module.eval()
    compiled = torch.compile(module, backend="inductor_freezing", options=BFLOAT16)
    with torch.no_grad():
        found, expected = compiled(*inputs), module(*inputs)
        usual = under_autocast(module, inputs)
        precise = module.double()(*(x.double() for x in inputs))
    errors = []
    for result in (found if usual is None else usual, found, expected):
        tensors, of_double = (torch.utils._pytree.tree_leaves(t) for t in (result, precise))
        errors.append(relative_error(of_double, [t.float() for t in tensors]))
    assert bool(asked) == (name in ("attention", "attention with a mask"))
    by_autocast, by_us, by_eager = errors
    assert by_us < (1e-2 if usual is None else 1.5 * by_autocast + 1e-6)
    assert name == "lstm" or by_us > 10 * by_eager, "it is computed in bfloat16"
    leaves = torch.utils._pytree.tree_leaves
    assert [t.dtype for t in leaves(found)] == [t.dtype for t in leaves(expected)]
    assert [t.stride() for t in leaves(found)] == [t.stride() for t in leaves(expected)]


def test_changed_weights_are_cast_again():
    module = nn.Linear(16, 16).eval()
    compiled = torch.compile(module, backend="inductor_freezing", options=BFLOAT16)
    x = torch.randn(4, 16)
    with torch.no_grad():
        compiled(x)
        module.weight.mul_(2)
        torch.testing.assert_close(compiled(x), module(x), rtol=0.03, atol=0.03)
