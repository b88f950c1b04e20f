"""Other people's training loops around our backends: the Trainer of Hugging Face, and Lightning."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import dynamo_backends
from tests.bench.programs import load

pytestmark = [
    # Said by Dynamo about itself, where the loss follows a graph break.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]
AGREE = 1e-3  # losses in float32, after some steps


@pytest.fixture
def huggingface(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name in ("BACKEND", "MODE"):  # the Trainer sets them for the whole process
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", "")
        monkeypatch.delenv(f"ACCELERATE_DYNAMO_{name}")
    return load("examples/train_huggingface.py")


@pytest.fixture
def accelerate_anew() -> Iterator[None]:
    """The first `Accelerator` of a process decides for all: a Trainer's, too."""
    from accelerate.state import AcceleratorState, GradientState

    def forget() -> None:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()

    forget()
    yield
    forget()


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    return load("examples/train_lightning.py")


def test_huggingface_trainer(huggingface: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with dynamo_backends.record() as reports:
        assert huggingface.main(["--steps", "4"]) == 0
    assert "openxla: loss" in " ".join(capsys.readouterr().out.split())
    kinds = [r.kind for r in reports]
    assert kinds.count("forward") == kinds.count("backward") >= 1
    assert {r.backend for r in reports} == {"openxla"}
    assert not any(r.runtime_fallbacks for r in reports)


def test_accelerate_gets_a_name_that_it_knows(huggingface: ModuleType) -> None:
    from accelerate.utils import DynamoBackend

    for backend in ("openxla", "inductor", "onnxrt", "tvm"):
        assert huggingface.name_for_accelerate(backend).upper() in DynamoBackend.__members__


@pytest.mark.parametrize(
    ("name", "backend"), [("onnxrt", "onnxrt"), ("aot_torchxla_trace_once", "openxla")]
)
def test_accelerate_compiles_with_the_backend_of_a_name(
    accelerate_anew: None, name: str, backend: str
) -> None:
    from accelerate import Accelerator

    model = Accelerator(cpu=True, dynamo_backend=name).prepare(nn.Linear(4, 4))
    with dynamo_backends.record() as reports:
        model(torch.randn(2, 4)).sum().backward()
    assert [(r.backend, r.kind) for r in reports] == [(backend, "forward"), (backend, "backward")]


def test_accelerate_takes_a_model_that_is_compiled(accelerate_anew: None) -> None:
    from accelerate import Accelerator

    model = Accelerator(cpu=True).prepare(torch.compile(nn.Linear(4, 4), backend="ov"))
    with dynamo_backends.record() as reports:
        model(torch.randn(2, 4)).sum().backward()
    assert [r.backend for r in reports] == ["ov", "ov"]


def test_lightning_in_both_ways(digits: ModuleType) -> None:
    expected = digits.train(digits.Digits(None), 1).losses
    with dynamo_backends.record() as reports:
        split = digits.train(digits.Digits("openxla"), 1)
    assert [r.kind for r in reports] == ["forward", "backward"]
    with dynamo_backends.record() as reports:
        whole = digits.train(digits.DigitsInOneGraph("openxla"), 1)
    assert [r.kind for r in reports] == ["step"]
    assert (whole.step.launches, whole.step.compilations) == (len(expected) - 1, 1)
    for losses in (split.losses, whole.losses):
        assert losses == pytest.approx(expected, abs=AGREE)


def test_a_missing_package_gives_exit_status_2(
    digits: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digits, "lightning", None)
    assert digits.main([]) == 2
    assert "pip install lightning" in capsys.readouterr().out


def test_a_training_that_differs_gives_exit_status_1(
    digits: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, modules = digits.train, []

    def other(module: Any, epochs: int) -> Any:
        modules.append(train(module, epochs))
        if len(modules) == 2:
            module.losses[-1] += 0.1
        return module

    monkeypatch.setattr(digits, "train", other)
    assert digits.main(["--epochs", "4", "--backend", "eager"]) == 1
