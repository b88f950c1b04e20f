"""Ranges of shapes: from Dynamo's symbols to the builder's profiles."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends import FallbackRefusedError
from dynamo_backends.trt.engine_builder import Range, describe, joined, profile_covers
from tests import refusals
from tests.trt.conftest import Machine
from tests.trt.helpers import compiled, net


def ranges(machine: Machine) -> list[list[Any]]:
    """The profiles of the engines that were built."""
    return [list(facts["ranges"].values()) for facts in machine.log.builds]


def test_bounds_that_the_user_gave(machine: Machine):
    model, x = net().to(machine.device), torch.randn(5, 6, device=machine.device)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=12)
    run, report = compiled(model, x)
    with torch.no_grad():
        for batch in (5, 12, 2, 7):
            y = torch.randn(batch, 6, device=machine.device)
            torch.testing.assert_close(run(y), model(y))
    assert report.executables == 4
    assert report.runtime_fallbacks == []
    if machine.log is not None:
        assert ranges(machine) == [[((2, 6), (5, 6), (12, 6))]]


def test_a_size_without_a_bound_and_one_beyond_the_profile(double: Machine):
    model = net()
    run, report = compiled(model, torch.randn(3, 6), dynamic=True, max_size=4)
    with torch.no_grad():
        for batch in (12, 20, 3):
            y = torch.randn(batch, 6)
            torch.testing.assert_close(run(y), model(y))
    assert ranges(double) == [[((2, 6), (3, 6), (12, 6))], [((2, 6), (20, 6), (80, 6))]]
    assert report.fallbacks == ()


def test_beyond_the_profile_can_be_refused(double: Machine):
    model = net()
    run, report = compiled(
        model, torch.randn(3, 6), dynamic=True, max_size=2, beyond_profile="refuse"
    )
    with torch.no_grad():
        y = torch.randn(9, 6)
        torch.testing.assert_close(run(y), model(y))
    assert len(double.log.builds) == 1
    (reason,) = {f.reason for f in report.fallbacks}
    assert "[2..6, 6], but was called with" in reason
    assert "[9, 6]" in reason
    assert "mark_dynamic(tensor, dim, min=..., max=...)" in reason
    torch._dynamo.reset()
    run, _ = compiled(model, torch.randn(3, 6), dynamic=True, max_size=2, beyond_profile="refuse",
                      fallback="error", cache=False)  # fmt: skip
    with torch.no_grad(), pytest.raises(FallbackRefusedError, match="the engine supports") as info:
        run(torch.randn(9, 6))
    assert "beyond_profile" in str(refusals.cause(info))


class Attention(nn.Module):
    """Sizes inside: reshapes, transposes and a sum over a dynamic dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        batch, length, _ = x.shape
        q, k, v = self.all(x).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = torch.softmax(q @ k.transpose(-1, -2) / 2, -1) @ v
        flat = mixed.transpose(1, 2).reshape(batch * length, 8)
        return flat, flat.sum(0)


def test_sizes_that_are_computed(double: Machine):
    model = Attention().eval()
    x = torch.randn(3, 5, 8)
    run, report = compiled(model, x, dynamic=True)
    with torch.no_grad():
        for shape in ((3, 5), (2, 7), (4, 11)):
            y = torch.randn(*shape, 8)
            torch.testing.assert_close(run(y), model(y))
    assert len(double.log.builds) == 1
    assert report.fallbacks == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_a_size_that_is_used_as_a_number(double: Machine, dtype: torch.dtype):
    """It is computed in the engine."""

    def fn(x: Tensor) -> Tensor:
        return (x * x.shape[0]).relu() + x

    run, report = compiled(fn, torch.ones(3, 4, dtype=dtype), dynamic=True)
    for batch in (3, 5, 7):
        x = torch.arange(batch * 4, dtype=dtype).view(batch, 4)
        torch.testing.assert_close(run(x), fn(x))
    assert len(double.log.builds) == 1
    assert report.fallbacks == ()


def test_memory_order_is_part_of_the_program(double: Machine):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    for memory in (torch.contiguous_format, torch.channels_last):
        torch._dynamo.reset()
        x = torch.randn(2, 3, 8, 8).to(memory_format=memory)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=8)
        run, report = compiled(model, x)
        with torch.no_grad():
            y = torch.randn(5, 3, 8, 8).to(memory_format=memory)
            torch.testing.assert_close(run(y), model(y))
            assert run(y).stride() == model(y).stride()
        assert report.runtime_fallbacks == []
    assert ranges(double) == [
        [((2, 3, 8, 8), (2, 3, 8, 8), (8, 3, 8, 8))],
        [((2, 8, 8, 3), (2, 8, 8, 3), (8, 8, 8, 3))],
    ]


def test_a_lowering_that_has_to_know_a_size(double: Machine):
    """Then every shape has an engine of its own."""

    def fn(x: Tensor) -> Tensor:
        return nn.functional.adaptive_avg_pool2d(x, (3, 3)).relu() * 2

    x = torch.randn(1, 2, 9, 9)
    run, report = compiled(fn, x, dynamic=True)
    for size in (9, 12):
        y = torch.randn(1, 2, size, size)
        torch.testing.assert_close(run(y), fn(y))
    assert report.runtime_fallbacks == []
    if report.fallbacks == ():
        assert [facts["ranges"] for facts in double.log.builds][-1] == {}


def test_a_profile_that_is_refused(double: Machine, monkeypatch: pytest.MonkeyPatch):
    config = sys.modules["tensorrt"].IBuilderConfig
    monkeypatch.setattr(config, "add_optimization_profile", lambda self, profile: -1)
    model, x = net(), torch.randn(3, 6)
    run, report = compiled(model, x, dynamic=True)
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))
    assert report.fallbacks == ()
    assert ranges(double) == [[]]


def test_ranges():
    small = {"x": Range((1, 4), (2, 4), (8, 4))}
    wide = {"x": Range((2, 4), (20, 4), (40, 4))}
    assert small["x"].holds((8, 4))
    assert not small["x"].holds((9, 4))
    assert not small["x"].holds((2, 4, 1))
    assert not profile_covers(small, wide)
    assert not profile_covers({}, wide)
    assert joined(small, wide) == {"x": Range((1, 4), (20, 4), (40, 4))}
    assert describe(small) == "x: [1..8, 4]"
    assert not Range((1,), (1,), (2,)).is_static


def test_static_and_dynamic_shapes_are_programs_of_their_own(double: Machine):
    model, x = net(), torch.randn(4, 6)
    for dynamic in (False, True):
        torch._dynamo.reset()
        run, _ = compiled(model, x, dynamic=dynamic)
        with torch.no_grad():
            torch.testing.assert_close(run(x), model(x))
    assert len(double.log.builds) == 2
    assert dynamo_backends.get_backend("tensorrt").dynamic_shapes.startswith("one engine")
