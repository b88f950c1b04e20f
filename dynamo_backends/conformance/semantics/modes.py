"""Modes: autocast, no_grad, inference mode, training and evaluation."""

from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from dynamo_backends.conformance.comparing import assert_close, assert_same, ensure
from dynamo_backends.conformance.registering import Table
from dynamo_backends.conformance.subject import Subject

CHECKS = Table()


@CHECKS.add
def batch_norm_in_training_mode_updates_its_buffers(subject: Subject) -> None:
    """Checks running averages of batch norm."""
    module, twin = (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).train() for _ in range(2)
    )
    twin.load_state_dict(module.state_dict())
    compiled = subject.compile(module)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(4, 3, 8, 8)
            assert_close(compiled(x), twin(x))
    for (name, ours), theirs in zip(module.named_buffers(), twin.buffers(), strict=True):
        ensure(torch.allclose(ours, theirs, 1e-4, 1e-4), f"the buffer {name} is not eager's")


@CHECKS.add
def batch_norm_in_training_of_images(subject: Subject) -> None:
    """Vendors' conversions compute with the averages that are kept, as after training."""
    module = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
    subject.check(module, torch.randn(4, 3, 96, 96))


@CHECKS.add
def training_and_evaluation_of_one_module(subject: Subject) -> None:
    """A compiled module follows `train` and `eval`."""
    module: Any = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.Dropout(0.5))
    compiled, x = subject.compile(module), torch.randn(8, 4)
    with torch.no_grad():
        for _ in range(2):
            assert_close(compiled.eval()(x), module.eval()(x))
            kept = module[1].running_mean.clone()
            result = compiled.train()(x)
            ensure(not torch.equal(kept, module[1].running_mean), "training updates no averages")
            ensure((result == 0).any(), "training has no dropout")


@CHECKS.add
def autocast_to_bfloat16(subject: Subject) -> None:
    """The dtype of results, and as accurate as eager's."""
    module = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()

    def fn(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found: Tensor = module(x)
            return found

    x = torch.randn(3, 16)
    with torch.no_grad():
        result = subject.compile(fn)(x)
        expected, precise = fn(x), module.double()(x.double())
    assert_same(expected, result, precise)
    ensure(result.dtype == torch.bfloat16, f"the dtype is {result.dtype}")


@CHECKS.add
def inference_mode(subject: Subject) -> None:
    """Results are inference tensors."""
    module, x = nn.Linear(4, 4).eval(), torch.randn(2, 4)
    with torch.inference_mode():
        result = subject.compile(module)(x)
        ensure(result.is_inference(), "the result is not an inference tensor")
        assert_close(result, module(x))


@CHECKS.add
def with_and_without_gradients_in_turn(subject: Subject) -> None:
    """One compiled module under `no_grad` and outside."""
    module, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), torch.randn(3, 4)
    compiled = subject.compile(module)
    for _ in range(2):
        with torch.no_grad():
            result = compiled(x)
        ensure(not result.requires_grad, "a result under no_grad requires a gradient")
        assert_close(result, module(x).detach())
        ensure(compiled(x).requires_grad, "a result outside no_grad requires no gradient")


class Sub(torch.Tensor):
    """A subclass without behaviour of its own."""


@CHECKS.add
def tensor_subclasses_give_eagers_result(subject: Subject) -> None:
    """A subclass as input."""
    x = torch.randn(3).as_subclass(Sub)
    result = subject.compile(lambda x: x * 2 + 1)(x)
    right = torch.equal(result.as_subclass(Tensor), x.as_subclass(Tensor) * 2 + 1)
    ensure(right, "the result is not eager's")


@CHECKS.each({"float32": torch.float32, "bool": torch.bool})
def queries_that_a_mask_hides_every_key_from(subject: Subject, value: torch.dtype) -> None:
    """Attention gives zeros for them."""
    visible = torch.rand(2, 1, 5, 5) > 0.3
    visible[0, 0, :2] = False  # as a batch that is padded to the left has them
    mask = visible if value == torch.bool else torch.zeros(2, 1, 5, 5).masked_fill(~visible, -inf)

    def fn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    q, k, v = (torch.randn(2, 2, 5, 8) for _ in range(3))
    with torch.no_grad():
        subject.check(fn, q, k, v, mask)
