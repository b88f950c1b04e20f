"""Checks gradients and training."""

import copy
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from dynamo_backends.conformance.comparing import assert_same
from dynamo_backends.conformance.registering import Table
from dynamo_backends.conformance.subject import Function, Subject

CHECKS = Table()


@CHECKS.add
def gradients_are_right(subject: Subject) -> None:
    """Checks the gradients of a small net with a loss."""
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(8 * 16, 10), nn.LayerNorm(10), nn.GELU(),
    )  # fmt: skip
    x = torch.randn(4, 3, 8, 8, requires_grad=True)
    target = torch.randint(0, 10, (4,))

    def gradients(model: Function, x: Tensor) -> list[Any]:
        module.zero_grad()
        x.grad = None
        nn.functional.cross_entropy(model(x), target).backward()
        return [x.grad, *(p.grad.clone() for p in module.parameters() if p.grad is not None)]

    state = {k: v.clone() for k, v in module.state_dict().items()}
    ours = gradients(subject.compile(module), x)
    module.load_state_dict(state)
    theirs = gradients(module, x)
    module.load_state_dict(state)
    module.double()
    precise = gradients(module, x.detach().double().requires_grad_())
    assert_same(theirs, ours, precise, "gradient")


_SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "masked": {"attn_mask": None},
    "scaled": {"scale": 0.3},
    "shared heads": {"enable_gqa": True},
}


@CHECKS.each(_SETTINGS)
def gradients_of_attention(subject: Subject, value: dict[str, Any]) -> None:
    """With each kind of argument."""
    inputs = tuple(torch.randn(2, n, 5, 8) for n in (4, 2, 2))
    settings = dict(value)
    if "enable_gqa" not in settings:
        inputs = (inputs[0], inputs[0] * 2, inputs[0] + 1)
    if "attn_mask" in settings:
        settings["attn_mask"] = torch.zeros(5, 5).masked_fill(torch.rand(5, 5) > 0.6, -inf)
    _attention(subject, settings, *inputs)


@CHECKS.add
def gradients_of_large_attention(subject: Subject) -> None:
    """Checks sizes at which an exporter's sum of exponentials would overflow."""
    _attention(subject, {}, *(torch.randn(2, 32, 32, 136) for _ in range(3)))


def _attention(subject: Subject, settings: dict[str, Any], *inputs: Tensor) -> None:
    def fn(*inputs: Tensor) -> Tensor:
        mask = settings.get("attn_mask")
        given = settings if mask is None else {"attn_mask": mask.to(inputs[0].dtype)}
        query, key, value = inputs
        return nn.functional.scaled_dot_product_attention(query, key, value, **given)

    def gradients(function: Function, *inputs: Tensor) -> list[Any]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        result = function(*leaves)
        result.square().sum().backward()
        return [result.detach(), *(x.grad for x in leaves)]

    ours = gradients(subject.compile(fn), *inputs)
    assert_same(gradients(fn, *inputs), ours, gradients(fn, *(x.double() for x in inputs)))


@CHECKS.each({mode: mode for mode in ("sum", "mean", "max")})
def gradients_of_large_bags(subject: Subject, value: str) -> None:
    """Checks gradients of bags of embeddings."""
    module = nn.EmbeddingBag(9000, 120, mode=value)
    bags = torch.randint(9000, (3, 4))

    def gradient(function: Function, module: nn.Module) -> list[Any]:
        module.weight.grad = None
        result = function(bags)
        result.square().sum().backward()
        return [result.detach(), module.weight.grad]

    ours, theirs = gradient(subject.compile(module), module), gradient(module, module)
    precise = copy.deepcopy(module).double()
    assert_same(theirs, ours, gradient(precise, precise))


@CHECKS.add
def an_optimizers_steps(subject: Subject) -> None:
    """Five steps of SGD with momentum end where eager's do."""
    x, y = torch.randn(16, 4), torch.randn(16, 1)
    module: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    theirs, precise = copy.deepcopy(module), copy.deepcopy(module).double()
    ends = []
    for run, owner in ((subject.compile(module), module), (theirs, theirs), (precise, precise)):
        dtype = owner[0].weight.dtype
        optimizer = torch.optim.SGD(owner.parameters(), lr=0.1, momentum=0.9)
        for _ in range(5):
            loss = nn.functional.mse_loss(run(x.to(dtype)), y.to(dtype))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ends.append([loss.detach(), *(p.detach() for p in owner.parameters())])
    ours, expected, reference = ends
    assert_same(expected, ours, reference, "parameter")
