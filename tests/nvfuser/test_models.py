"""Small models, in inference and in training."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends import GraphReport
from tests.checking import assert_same


class Residual(nn.Module):
    """Two convolutions with batch normalisation and a bypass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(y)) + x)


class Attention(nn.Module):
    """A transformer's layer with the attention written out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm(x)).view(batch, length, 3, 2, width // 2).permute(2, 3, 0, 1, 4)
        q, k, v = heads.unbind(0)
        future = torch.ones(length, length, dtype=torch.bool).tril()
        scores = (q @ k.mT / 2).masked_fill(~future, float("-inf"))
        mixed = (scores.softmax(-1) @ v).permute(1, 2, 0, 3).reshape(batch, length, width)
        x = x + self.out(mixed)
        return x + self.mlp(x)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))


MODELS = {
    "mlp": (mlp, lambda: torch.randn(5, 6)),
    "residual block": (Residual, lambda: torch.randn(2, 4, 6, 6)),
    "attention": (Attention, lambda: torch.randn(2, 5, 8)),
}
IN_EAGER = {
    "mlp": set(),
    "residual block": {"aten.convolution.default", "aten.convolution_backward.default"},
    "attention": {"aten.tril.default"},
}
LEFT = "it has no lowering to nvFuser"


def compile_model(model: nn.Module) -> Any:
    backend = dynamo_backends.compiler("nvfuser", fragmented="keep", min_block_size=1)
    return torch.compile(model, backend=backend, fullgraph=True)


def eager_operators(reports: list[GraphReport]) -> set[str]:
    assert not any(r.runtime_fallbacks for r in reports), [r.runtime_fallbacks for r in reports]
    assert all(r.ops_on_backend > 0 for r in reports)
    return {f.op for r in reports for f in r.fallbacks}


@pytest.mark.parametrize("name", MODELS)
def test_inference(nvfuser: str, name: str):
    make, inputs = MODELS[name]
    model, x = make().eval(), inputs()
    with torch.no_grad(), dynamo_backends.record() as reports:
        result = compile_model(model)(x)
        assert_same(model(x), result, copy.deepcopy(model).double()(x.double()))
    assert eager_operators(reports) <= IN_EAGER[name]


def gradients(model: nn.Module, function: Any, x: Tensor) -> list[Tensor]:
    """The result, the inputs' gradient, the parameters' and the buffers."""
    x = x.detach().clone().requires_grad_()
    model.zero_grad()
    result = function(x)
    (result * torch.linspace(-1, 1, result.numel(), dtype=x.dtype).view_as(result)).sum().backward()
    assert x.grad is not None
    found = [result.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
    return found + [b.clone() for b in model.buffers()]


def test_a_whole_training_step_is_one_fusion(nvfuser: str):
    model, twin = mlp(), mlp()
    twin.load_state_dict(model.state_dict())

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, twin)]
    ours, theirs = train(model, optimizers[0]), train(twin, optimizers[1])
    step = dynamo_backends.compile_step(
        ours, model=model, optimizer=optimizers[0], backend="nvfuser"
    )
    with dynamo_backends.record() as reports:
        for _ in range(3):
            x, y = torch.randn(5, 6), torch.randn(5, 3)
            torch.testing.assert_close(step(x, y), theirs(x, y), rtol=1e-4, atol=1e-5)
    assert [(r.kind, r.ops_in_eager) for r in reports] == [("step", 0)]


@pytest.mark.parametrize("name", MODELS)
def test_training(nvfuser: str, name: str):
    make, inputs = MODELS[name]
    model, x = make().train(), inputs()
    twin, precise = copy.deepcopy(model), copy.deepcopy(model).double()
    with dynamo_backends.record() as reports:
        ours = gradients(model, compile_model(model), x)
    assert_same(gradients(twin, twin, x), ours, gradients(precise, precise, x.double()))
    assert {r.kind for r in reports} == {"forward", "backward"}
    assert eager_operators(reports) <= IN_EAGER[name]
