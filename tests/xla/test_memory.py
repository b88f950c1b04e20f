"""Weights and inputs in every kind of memory on openxla: inference, training, packages, steps."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dynamo_backends
from dynamo_backends import compile_step
from dynamo_backends.conformance.subject import float64_copy, gradients
from dynamo_backends.xla import _jaxlib
from tests import memory
from tests.aot.step_checks import assert_one_program
from tests.checking import assert_same
from tests.models import memory_models as models

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many arguments each launch of a program had, all of which have to be ready."""
    counts: list[int] = []
    late: list[tuple[int, int]] = []

    def watched(make: Callable[..., Any]) -> Callable[..., Any]:
        def watching(*settings: Any) -> Callable[[list[Any]], Any]:
            call = make(*settings)

            def launch(buffers: list[Any]) -> Any:
                late.extend((len(counts), i) for i, b in enumerate(buffers) if not b.is_ready())
                counts.append(len(buffers))
                return call(buffers)

            return launch

        return watching

    for name in ("make_single_device_call", "make_lazy_device_call"):
        monkeypatch.setattr(_jaxlib, name, watched(getattr(_jaxlib, name)))
    yield counts
    assert counts
    assert late == [], "launch and argument"


@pytest.mark.parametrize("model", models.MODELS)
def test_every_kind_of_memory_is_right(model: str, tmp_path: Path):
    models.check("openxla", model, memory.KINDS, tmp_path)


@pytest.mark.parametrize("freezing", ["probe", "strict", "off"])
@pytest.mark.parametrize("kind", memory.UNALIGNED)
def test_first_calls_are_right_in_memory_that_is_not_aligned(
    kind: str, freezing: str, tmp_path: Path
):
    models.check("openxla", "linear head", [kind], tmp_path, verify="first", freezing=freezing)


@pytest.mark.parametrize("model", ["small linear head", "conv net"])
def test_gradients_are_right_in_memory_that_is_not_aligned(model: str, tmp_path: Path):
    module, inputs = models.build(model, tmp_path / "model")
    given = memory.contents(module)
    compiled = torch.compile(module, backend="openxla", dynamic=False)
    for kind in memory.UNALIGNED:
        memory.place_weights(module, given, kind, tmp_path / kind, requires_grad=True)
        placed = memory.place_inputs(inputs, kind, tmp_path / kind / "inputs")
        wide = float64_copy(module)
        precise = gradients(wide, wide, {name: x.double() for name, x in placed.items()})
        expected = gradients(module, module, placed)
        assert_same(expected, gradients(compiled, module, placed), precise, f"{kind}: gradient")


@pytest.mark.parametrize("kind", ["safetensors, mapped", "slices of a flat buffer"])
def test_packages_are_right_in_memory_that_is_not_aligned(kind: str, tmp_path: Path):
    module, inputs = models.build("small linear head", tmp_path / "model")
    memory.place_weights(module, memory.contents(module), kind, tmp_path / "weights")
    placed = memory.place_inputs(inputs, kind, tmp_path / "inputs")
    path = tmp_path / "model.dbp"
    with torch.no_grad():
        dynamo_backends.save(module, path, kwargs=placed, backend="openxla")
        result = dynamo_backends.load(path, strict=True)(**placed)
        precise = float64_copy(module)(**{name: x.double() for name, x in placed.items()})
        assert_same(module(**placed), result, precise)


class _Training:
    """A training step of a small head, whose weights are of a kind."""

    def __init__(self, kind: str, folder: Path, dtype: torch.dtype = torch.float32):
        torch.manual_seed(0)
        self.module = nn.Linear(512, 1000)
        memory.place_weights(
            self.module, memory.contents(self.module), kind, folder, requires_grad=True
        )
        self.module.to(dtype)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.module(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


@pytest.mark.parametrize("kind", memory.UNALIGNED)
def test_steps_are_right_in_memory_that_is_not_aligned(kind: str, tmp_path: Path):
    ours, theirs = (_Training(kind, tmp_path / str(i)) for i in range(2))
    precise = _Training(kind, tmp_path / "precise", torch.float64)
    step = compile_step(
        ours.__call__, model=ours.module, optimizer=ours.optimizer, backend="openxla"
    )
    for _ in range(3):
        (x,) = memory.place_inputs({"x": torch.randn(32, 512)}, kind, tmp_path / "x").values()
        assert_same(theirs(x), step(x), precise(x.double()))
    assert_one_program(step, 3)
    parameters = [list(each.module.parameters()) for each in (theirs, ours, precise)]
    assert_same(*([p.detach() for p in each] for each in parameters), "parameter")
