"""The option `verify` and what happens when compiled code is wrong or fails."""

from dataclasses import replace

import jax.numpy as jnp
import pytest
import torch
from torch import nn

import dynamo_backends
from dynamo_backends import VerificationError
from dynamo_backends.interface.report import EagerEvent
from dynamo_backends.runtime.program import Block
from dynamo_backends.verify import describe_difference
from dynamo_backends.xla.lowering import registry
from dynamo_backends.xla.runtime import XlaExecutable

SIN = torch.ops.aten.sin.default


@pytest.fixture
def wrong_sine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lowering of sin that is one thousandth off."""
    __import__("dynamo_backends.xla.lowering")
    row = registry.lookup(SIN)
    assert row is not None
    monkeypatch.setitem(
        registry._TABLE, SIN, replace(row, fn=lambda x: jnp.sin(x) * jnp.float32(1.001))
    )


def fn(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2 + 1


def test_a_right_graph_passes_and_is_kept():
    compiler = dynamo_backends.compiler("openxla")
    with dynamo_backends.record() as reports:
        compiled = torch.compile(fn, backend=compiler)
        x = torch.randn(10)
        torch.testing.assert_close(compiled(x), fn(x))
        torch.testing.assert_close(compiled(x + 1), fn(x + 1))
    assert reports[0].runtime_fallbacks == []
    assert reports[0].verified == 1, "the first call is compared, and no other"


def test_random_numbers_do_not_disturb_verification():
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x * 3, 0.5, training=True) + torch.rand_like(x)

    compiler = dynamo_backends.compiler("openxla", fallback="error")
    x = torch.randn(100)
    torch.manual_seed(5)
    result = torch.compile(noisy, backend=compiler)(x)
    after = torch.rand(1)
    torch.manual_seed(5)
    torch.testing.assert_close(result, noisy(x))
    assert torch.equal(after, torch.rand(1)), "verifying must not draw from the user's generator"


@pytest.mark.usefixtures("wrong_sine")
def test_without_verification_the_planted_error_shows():
    x = torch.randn(10)
    compiler = dynamo_backends.compiler("openxla", cache=False, verify="off")
    compiled = torch.compile(fn, backend=compiler)
    assert not torch.allclose(compiled(x), fn(x))


@pytest.mark.plants_errors
@pytest.mark.usefixtures("wrong_sine")
def test_a_wrong_graph_is_replaced_by_eager(caplog: pytest.LogCaptureFixture):
    compiler = dynamo_backends.compiler("openxla", cache=False)
    x = torch.randn(10)
    with dynamo_backends.record() as reports:
        compiled = torch.compile(fn, backend=compiler)
        for _ in range(3):
            assert torch.equal(compiled(x), fn(x))
    (event,) = reports[0].events
    assert (event.kind, event.region) == ("wrong", "block")
    text = event.reason
    (record,) = caplog.records
    assert record.message == f"{text}; the block runs in eager from now on"
    assert "openxla computed a wrong result in the inference graph of capture" in text
    assert "output 0 differs from eager by up to" in text
    assert "a block of 3 operators from aten.sin.default to aten.add.Tensor, at " in text
    assert "x.sin() * 2 + 1" in text


@pytest.mark.usefixtures("wrong_sine")
def test_a_wrong_graph_raises_if_fallback_is_an_error():
    compiler = dynamo_backends.compiler("openxla", fallback="error", cache=False)
    with pytest.raises(VerificationError, match="output 0 differs from eager by up to"):
        torch.compile(fn, backend=compiler)(torch.randn(10))


def test_code_that_fails_at_run_time_is_replaced_by_eager(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fail(*_: object) -> None:
        raise RuntimeError("the vendor's library broke")

    monkeypatch.setattr(XlaExecutable, "_prepare", fail)
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    x = torch.randn(3, 4)
    with torch.no_grad(), dynamo_backends.record() as reports:
        compiled = torch.compile(module, backend=dynamo_backends.compiler("openxla"))
        for _ in range(2):
            assert torch.equal(compiled(x), module(x))
    reason = "RuntimeError: the vendor's library broke"
    assert reports[0].events == [EagerEvent("failed", "block", reason)]
    text = f"a compiled block of openxla failed ({reason}); the block runs in eager from now on"
    assert text in caplog.text


def test_a_failure_in_the_lazily_compiled_backward_reaches_no_user(
    monkeypatch: pytest.MonkeyPatch,
):
    module = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    compiled = torch.compile(module, backend=dynamo_backends.compiler("openxla"))
    loss = compiled(x).square().sum()
    calls = []
    run = Block.__call__

    def fail_inside(self: Block, values: object) -> object:
        calls.append(self)
        self._unbound = lambda _: 1 / 0  # type: ignore[assignment,return-value]
        return run(self, values)  # type: ignore[arg-type]

    monkeypatch.setattr(Block, "__call__", fail_inside)
    loss.backward()
    assert calls
    ours = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    module(x).square().sum().backward()
    for our, p in zip(ours, module.parameters(), strict=True):
        torch.testing.assert_close(our, p.grad)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bfloat16, torch.float64], ids=str)
def test_how_far_a_result_is_off_is_told(dtype: torch.dtype):
    right = torch.ones(3, dtype=dtype)
    text = describe_difference(
        [right], [right * 2], [right.to(torch.promote_types(dtype, torch.float64))]
    )
    assert text == "output 0 differs from eager by up to 1.000e+00"
