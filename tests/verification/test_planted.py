"""Planted wrong kernels are found at the first call, replaced by eager, and named in a warning."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends.aot.step.program import record_program
from dynamo_backends.interface.errors import VerificationError
from dynamo_backends.interface.registry import get_backend
from tests.verification.planted import FAULTS, Net, Planted, WrongStep, divide

pytestmark = pytest.mark.plants_errors

BACKENDS = (
    "iree",
    pytest.param("inductor_freezing", marks=pytest.mark.long),
    pytest.param("inductor_max_autotune", marks=pytest.mark.long),
    "ltc",
    "ltc_trace",
    "ofi",
    "onednn_graph",
    "onnxrt",
    "openxla",
    "ov",
    "static_runtime",
    "ts_trace",
    "tvm",
)


def infer(fault: str, compile_it: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Results of eager and of a compiled function, for two calls."""
    torch.manual_seed(1)
    model, x = Net().eval(), torch.randn(4, 6)
    if fault == "a NaN lost":
        x[1, 2] = torch.nan
    compiled = compile_it(model)
    with torch.no_grad():
        return [model(x), model(x + 1)], [compiled(x), compiled(x + 1)]


def train(compile_it: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Gradients of eager and of a compiled function."""
    torch.manual_seed(1)
    model, x = Net(), torch.randn(4, 6)
    compiled = compile_it(model)
    parameters = list(model.parameters())
    return tuple(
        torch.autograd.grad(run(x).square().sum(), parameters) for run in (model, compiled)
    )


def divide_integers(compile_it: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Quotients of eager and of a compiled function."""
    x, y = torch.arange(12) * (2**31 - 7), torch.full((12,), 7)
    return [divide(x, y)], [compile_it(divide)(x, y)]


def run(fault: str, compile_it: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Eager's results, and those of compiled code with a fault."""
    if fault == "a wrong gradient":
        return train(compile_it)
    if fault == "an integer division through floats":
        return divide_integers(compile_it)
    return infer(fault, compile_it)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wrong_kernel_is_found(
    backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    planted = Planted()
    planted.plant(monkeypatch)
    for fault in FAULTS:
        if fault == "a wrong gradient" and not get_backend(backend).trains:
            continue
        torch._dynamo.reset()
        caplog.clear()
        planted.fault, planted.calls = FAULTS[fault], 0
        compiler = dynamo_backends.compiler(backend, cache=False, min_block_size=1)
        with dynamo_backends.record() as reports, warnings.catch_warnings():
            expected, results = run(fault, lambda f: torch.compile(f, backend=compiler))  # noqa: B023
        for e, r in zip(expected, results, strict=True):
            torch.testing.assert_close(r, e, equal_nan=True)
        if "integer" in fault and not any(r.ops_on_backend for r in reports):
            continue  # eager divides, and the report says why
        assert planted.calls > 0, fault
        texts = [text for report in reports for text in report.runtime_fallbacks]
        assert len(texts) == planted.calls, "each block ran once, and is named once"
        told = [r.getMessage() for r in caplog.records if "computed a wrong result" in r.message]
        assert told == [f"{text}; the block runs in eager from now on" for text in texts]
        kind = "backward" if fault == "a wrong gradient" else "inference"
        for text in texts:
            assert text.startswith(f"{backend} computed a wrong result in the {kind} graph"), text
            assert "output " in text
            assert "(a block of " in text


@pytest.mark.parametrize("fault", ["a transposed weight", "a wrong gradient"])
def test_a_wrong_kernel_raises_if_fallback_is_an_error(fault: str, monkeypatch: pytest.MonkeyPatch):
    planted = Planted(FAULTS[fault])
    planted.plant(monkeypatch)
    compiler = dynamo_backends.compiler("ts_trace", fallback="error")
    with pytest.raises(VerificationError, match="ts_trace computed a wrong result"):
        run(fault, lambda f: torch.compile(f, backend=compiler))


class Step:
    """A model that is trained, with the function that does so."""

    def __init__(self, model: nn.Module, lr: float, kind: type[torch.optim.Optimizer]):
        self.model = model
        self.optimizer = kind(model.parameters(), lr=lr)

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def compiled(self, backend: str) -> Any:
        return dynamo_backends.compile_step(
            self, model=self.model, optimizer=self.optimizer, backend=backend
        )


@pytest.mark.parametrize("backend", ["openxla", "ts_trace"])
def test_a_wrong_step_is_found(
    backend: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    steps = record_program.VerifiedStep

    def planted(program: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        return steps(WrongStep(program, graph), graph, *args, **kwargs)

    monkeypatch.setattr(record_program, "VerifiedStep", planted)
    # Such small steps that no parameter is off by more than the tolerance of results.
    ours = Step(Net(), 1e-3, torch.optim.SGD)
    theirs = Step(copy.deepcopy(ours.model), 1e-3, torch.optim.SGD)
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    with dynamo_backends.record() as reports:
        step = ours.compiled(backend)
        for _ in range(3):
            torch.testing.assert_close(step(x, y), theirs(x, y).detach())
    for ours_p, theirs_p in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(ours_p, theirs_p, rtol=1e-6, atol=1e-8)
    (event,) = reports[0].events
    assert (event.kind, event.region) == ("wrong", "step")
    text = event.reason
    told = [r.getMessage() for r in caplog.records if "computed a wrong result" in r.message]
    assert told == [f"{text}; the step runs in eager from now on"]
    assert f"{backend} computed a wrong result in the step graph: the update of" in text
    assert step.eager_steps == 2, "what comes after runs in eager"


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("openxla", torch.optim.SGD),
        ("openxla", torch.optim.AdamW),
        ("inductor", torch.optim.AdamW),
    ],
)
def test_a_right_step_is_kept(
    backend: str, kind: type[torch.optim.Optimizer], caplog: pytest.LogCaptureFixture
):
    ours = Step(Net(), 1e-2, kind)
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    with dynamo_backends.record() as reports:
        step = ours.compiled(backend)
        for _ in range(2):
            step(x, y)
    assert reports[0].runtime_fallbacks == reports[0].unverified == []
    assert reports[0].verified == 1
    assert (step.launches, step.eager_steps) in ((2, 0), (1, 1))  # the first may be recorded
    assert not caplog.records
