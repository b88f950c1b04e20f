"""Layers whose input or weight needs no gradient, and layers that the backward computes again."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dynamo_backends import compile_step

BACKENDS = ("openxla", "onnxrt", "ov", "inductor")

Kind = Any


def images(first: nn.Module, *frozen: str) -> tuple[nn.Module, Tensor]:
    """A net of images that begins with a layer, some of whose parameters are not trained."""
    model = nn.Sequential(first, nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))
    return freeze(model, *frozen), torch.randn(4, 3, 6, 6, generator=torch.manual_seed(1))


def rows(first: nn.Module, *frozen: str) -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(first, nn.Linear(6, 5))
    return freeze(model, *frozen), torch.randn(4, 6, generator=torch.manual_seed(1))


def freeze(model: nn.Module, *names: str) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(names or ("nothing",)))
    return model


def after_frozen(norm: nn.Module, *frozen: str) -> tuple[nn.Module, Tensor]:
    """A norm after a frozen convolution."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))
    return freeze(model, "0", *frozen), torch.randn(4, 3, 6, 6, generator=torch.manual_seed(1))


KINDS: dict[str, Kind] = {
    "batch norm first": lambda: images(nn.BatchNorm2d(3)),
    "batch norm in evaluation": lambda: images(nn.BatchNorm2d(3).eval()),
    "batch norm of rows": lambda: rows(nn.BatchNorm1d(6)),
    "batch norm, frozen weight": lambda: images(nn.BatchNorm2d(3), "0.weight", "1.bias"),
    "instance norm first": lambda: images(nn.InstanceNorm2d(3, affine=True)),
    "instance norm with statistics": lambda: images(
        nn.InstanceNorm2d(3, affine=True, track_running_stats=True)
    ),
    "group norm first": lambda: images(nn.GroupNorm(1, 3)),
    "layer norm, frozen weight": lambda: rows(nn.LayerNorm(6), "0.weight"),
    "rms norm first": lambda: rows(nn.RMSNorm(6)),
    "frozen convolution, batch norm": lambda: after_frozen(nn.BatchNorm2d(4)),
    "frozen convolution, group norm": lambda: after_frozen(nn.GroupNorm(2, 4), "1.bias"),
    "transposed convolution first": lambda: (
        freeze(nn.Sequential(nn.ConvTranspose2d(3, 4, 3), nn.Flatten(), nn.Linear(256, 5)), "0.w"),
        torch.randn(4, 3, 6, 6, generator=torch.manual_seed(1)),
    ),
}


def function_of(model: Any, owner: nn.Module) -> tuple[Any, torch.optim.Optimizer]:
    trained = [p for p in owner.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)

    def function(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return function, optimizer


def assert_equal(eager: nn.Module, ours: nn.Module) -> None:
    for name, expected in eager.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_whose_input_needs_no_gradient(backend: str, kind: str):
    model, x = KINDS[kind]()
    eager, y = copy.deepcopy(model), torch.tensor([0, 1, 4, 2])
    reference, _ = function_of(eager, eager)
    options = {} if backend == "inductor" else {"options": {"verify": "off"}}
    compiled, _ = function_of(torch.compile(model, backend=backend, **options), model)
    for _ in range(2):
        torch.testing.assert_close(compiled(x, y), reference(x, y), rtol=1e-4, atol=1e-5)
    assert_equal(eager, model)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_whose_first_layer_needs_no_gradient_of_its_input(backend: str, kind: str):
    model, x = KINDS[kind]()
    eager, y = copy.deepcopy(model), torch.tensor([0, 1, 4, 2])
    reference, _ = function_of(eager, eager)
    function, optimizer = function_of(model, model)
    # OpenVINO takes no whole steps, and ONNX Runtime none with gradients of convolutions.
    fallback = "split" if backend in ("ov", "onnxrt") else "error"
    step = compile_step(
        function, model=model, optimizer=optimizer, backend=backend, fallback=fallback
    )
    for _ in range(3):
        torch.testing.assert_close(step(x, y), reference(x, y), rtol=1e-4, atol=1e-5)
    if fallback == "error":
        assert (step.launches, step.eager_steps) == (2, 1)
    assert_equal(eager, model)


class Checkpointed(nn.Module):
    """A batch norm that is computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        run = lambda x: self.norm(self.first(x)).relu()  # noqa: E731
        return self.last(checkpoint(run, x, use_reentrant=False))


@pytest.mark.parametrize("partitioner", ["default", "min_cut"])
@pytest.mark.parametrize("backend", ["openxla", "onnxrt", "ov"])
def test_a_checkpoint_around_a_batch_norm(backend: str, partitioner: str):
    """Eager updates the running statistics twice, as torch does not in what it compiles."""
    model = Checkpointed()
    eager, once = copy.deepcopy(model), copy.deepcopy(model)
    x, y = torch.randn(4, 6), torch.tensor([0, 1, 4, 2])
    reference, _ = function_of(eager, eager)
    torchs, _ = function_of(torch.compile(once, backend="aot_eager"), once)
    compiled = torch.compile(model, backend=backend, options={"partitioner": partitioner})
    ours, _ = function_of(compiled, model)
    for _ in range(2):
        expected = reference(x, y)
        torchs(x, y)
        torch.testing.assert_close(ours(x, y), expected, rtol=1e-4, atol=1e-5)
    assert_equal(once, model)
    for name, parameter in eager.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter, rtol=1e-4, atol=1e-5)
