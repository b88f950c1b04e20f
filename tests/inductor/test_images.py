"""Steps for Inductor on CPUs treat images in ways of their own, and compute what eager computes."""

import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dynamo_backends
from dynamo_backends.inductor import norms
from dynamo_backends.interface.errors import StepCaptureError
from dynamo_backends.kernels import convolution_gradients as convolutions
from dynamo_backends.kernels import timing as measured
from dynamo_backends.kernels.convolution_gradients import BY_PRODUCT
from dynamo_backends.kernels.patterns import CONVOLUTION_BACKWARD
from dynamo_backends.workers.kernel_choices import Choices
from tests.aot.step_checks import assert_equal_to_eager
from tests.kernels.planted import Memory, plant
from tests.training.stepping import OPTIMIZERS

aten = torch.ops.aten


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype)


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_by_rows_is_eagers(affine: bool) -> None:
    image = draw(3, 4, 5, 6).requires_grad_()
    weight, bias = (draw(4, seed=n).requires_grad_() if affine else None for n in (2, 3))
    running = [torch.rand(4, dtype=torch.float64), torch.rand(4, dtype=torch.float64) + 1]
    expected_running = [x.clone() for x in running]
    expected = F.batch_norm(image, *expected_running, weight, bias, True, 0.3, 1e-3)
    gradient = draw(3, 4, 5, 6, seed=4)
    wanted = [x for x in (image, weight, bias) if x is not None]
    gradients = torch.autograd.grad(expected, wanted, gradient)
    with torch.no_grad():
        found, mean, invstd, *moved = norms.batch_norm_forward(
            image, weight, bias, *running, 0.3, 1e-3
        )
        mask = [True, affine, affine]
        back = norms.backward(gradient, image, weight, mean, invstd, mask)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(moved, expected_running, rtol=1e-12, atol=1e-12)
    computed = [x for x in back if x is not None]
    torch.testing.assert_close(computed, list(gradients), rtol=1e-11, atol=1e-12)


def test_moments_by_rows_are_as_good_as_eagers() -> None:
    """Of numbers far from zero, where sums of squares would be far off."""
    image = draw(4, 8, 40, 48, dtype=torch.float32) + 30
    exact = image.double()
    image = image.contiguous(memory_format=torch.channels_last)
    _, mean, invstd, _, _ = norms.batch_norm_forward(image, None, None, None, None, 0.1, 0.0)
    torch.testing.assert_close(mean.double(), exact.mean((0, 2, 3)), rtol=3e-7, atol=0)
    variance = exact.var((0, 2, 3), correction=0)
    torch.testing.assert_close(invstd.double(), variance.rsqrt(), rtol=3e-7, atol=0)


def test_halves_are_normalized_in_floats() -> None:
    image = draw(2, 3, 4, 5).bfloat16()
    weight, bias = torch.rand(3), torch.rand(3)
    found, mean, *_ = norms.batch_norm_forward(image, weight, bias, None, None, 0.1, 1e-5)
    expected = F.batch_norm(image.double(), None, None, weight.double(), bias.double(), True)
    assert (found.dtype, mean.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(found, expected.bfloat16(), rtol=1e-2, atol=1e-2)
    back = norms.backward(found, image, weight, mean, torch.ones(3), [True, True, True])
    assert [x.dtype for x in back if x is not None] == [
        torch.bfloat16, torch.float32, torch.float32,
    ]  # fmt: skip


SETTINGS = list(
    itertools.product([(1, 1), (2, 1)], [(0, 0), (1, 2)], [(1, 1), (3, 3), (2, 3)], [True, False])
)


@pytest.mark.parametrize(("stride", "padding", "window", "last"), SETTINGS)
def test_gradients_as_products_are_atens(
    stride: tuple[int, int], padding: tuple[int, int], window: tuple[int, int], last: bool
) -> None:
    image, weight = draw(2, 3, 7, 9), draw(5, 3, *window, seed=2)
    if last:
        image = image.contiguous(memory_format=torch.channels_last)
        weight = weight.contiguous(memory_format=torch.channels_last)
    gradient = torch.randn_like(F.conv2d(image, weight, None, stride, padding))
    settings = ([5], stride, padding, [1, 1], False, [0, 0], 1)
    for mask in ([True, True, True], [False, True, False], [True, True, False]):
        expected = aten.convolution_backward(gradient, image, weight, *settings, mask)
        for operator in (BY_PRODUCT, CONVOLUTION_BACKWARD):
            found = operator(gradient, image, weight, *settings, mask)
            assert [x is None for x in found] == [not wanted for wanted in mask]
            for x, y in zip(found, expected, strict=True):
                if y is not None:
                    torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)
            assert found[1].is_contiguous()


class Layouts(nn.Module):
    """Does what depends on the order of an image in memory, after what changes the order."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4)
        self.back = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.dropout(self.norm(self.first(x)).relu(), 0.25)
        x = F.max_pool2d(x, 3, stride=2, padding=1, ceil_mode=True)
        x = self.grouped(x)
        x = x + torch.rand_like(x)
        flat = x.view(len(x), -1)
        x = (x + flat.as_strided(x.shape, x.stride())).mul(0.5)
        x = self.back(F.instance_norm(x))
        x = F.max_pool2d(x + x.detach().view(torch.int64).view(x.dtype), 2)
        return self.out(x.mean((2, 3))), x.detach()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Any:
    found, image = model(x)
    loss = found.square().mean() + image.mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), image


@pytest.mark.long
def test_what_depends_on_layouts_gets_eagers() -> None:
    """Draws in the order of memory, strides of results, and views of memory."""
    step = assert_equal_to_eager(
        Layouts, OPTIMIZERS["adamw"], [(draw(2, 3, 12, 16),)] * 3, "inductor"
    )
    assert step.compilations == 1


class Convolutions(nn.Module):
    """The convolutions of `Layouts`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.grouped = nn.Conv2d(8, 8, 3, padding=2, dilation=2, groups=4)
        self.back = nn.ConvTranspose2d(8, 4, 2, stride=2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.back(self.grouped(self.first(x).relu()))
        return x.mean((2, 3)), x.detach()


class OneConvolution(nn.Module):
    """The first one: the only one whose gradients can be products."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x).relu()
        return x.mean((2, 3)), x.detach()


def compiled_step(kind: Callable[[], nn.Module] = OneConvolution) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    model = kind().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    step = dynamo_backends.compile_step(
        lambda x: train(model, optimizer, x), model=model, optimizer=optimizer, backend="inductor"
    )
    return step, model


def twice(step: Any, *batch: Tensor) -> Any:
    """Calls a step in eager, and compiled; returns the second result."""
    step(*batch)
    return step(*batch)


class Gate(nn.Module):
    """Draws with probabilities that come out of a convolution."""

    def __init__(self, noise: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.noise:
            x = x + torch.rand_like(x)
        return x * torch.bernoulli(x.detach().sigmoid())


def test_draws_that_depend_on_images_are_in_eagers_order() -> None:
    assert_equal_to_eager(Gate, OPTIMIZERS["sgd"], [(draw(2, 3, 6, 5),)] * 2, "inductor")


def test_draws_that_inductor_cannot_order_are_refused() -> None:
    model = Gate(noise=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def function(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = dynamo_backends.compile_step(
        function, model=model, optimizer=optimizer, backend="inductor"
    )
    step(draw(2, 3, 6, 5, dtype=torch.float32))  # in eager
    with pytest.raises(StepCaptureError, match=r'(?s)random numbers.*fallback="split"'):
        step(draw(2, 3, 6, 5, dtype=torch.float32))


@pytest.mark.long
def test_images_that_a_step_returns_have_eagers_strides() -> None:
    torch.manual_seed(0)
    model = Layouts().double()
    _, expected = train(model, torch.optim.SGD(model.parameters(), lr=1e-2), draw(2, 3, 12, 16))
    step, model = compiled_step(Layouts)
    _, found = twice(step, draw(2, 3, 12, 16))
    assert found.stride() == expected.stride()
    assert all(p.is_contiguous() for p in model.parameters())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradients_that_a_step_leaves_have_the_layout_of_parameters(
    layout: torch.memory_format,
) -> None:
    def trained(compiled: bool) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)).double()
        model.to(memory_format=layout)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

        def function(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        step: Any = function
        if compiled:
            step = dynamo_backends.compile_step(
                function, model=model, optimizer=optimizer, backend="inductor"
            )
        for seed in range(3):
            step(draw(2, 3, 8, 9, seed=seed).contiguous(memory_format=layout))
        return model

    for expected, found in zip(
        trained(False).parameters(), trained(True).parameters(), strict=True
    ):
        assert expected.grad is not None
        assert found.grad is not None
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-9, atol=1e-12)
        assert (found.stride(), found.grad.stride()) == (expected.stride(), expected.grad.stride())


@pytest.fixture
def races(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Kinds of convolutions that were measured; a product always wins."""
    found: list[Any] = []

    def race(usual: str, runs: Any, layouts: Any) -> str:
        found.append(layouts)
        return "product"

    plant(monkeypatch, race)
    return found


def used(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Any]]:
    """The operators for gradients of convolutions in the next step that is compiled."""
    modules: list[Any] = []
    choose = convolutions.choose_kernels

    def spy(module: Any) -> None:
        choose(module)
        modules.append(module)

    monkeypatch.setattr("dynamo_backends.inductor.steps.choose_kernels", spy)
    kinds = (CONVOLUTION_BACKWARD, BY_PRODUCT)
    return lambda: [n.target for n in modules[-1].graph.nodes if n.target in kinds]


def test_each_kind_of_convolution_is_measured_once(
    races: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = used(monkeypatch)
    step, model = compiled_step(Convolutions)
    _, image = twice(step, draw(2, 3, 12, 16))
    assert image.is_contiguous(), "what is computed channels last is returned as eager returns it"
    assert all(p.is_contiguous() for p in model.parameters())
    assert targets().count(BY_PRODUCT) == 1, "the others have groups or are transposed"
    assert len(targets()) == 3
    assert len(races) == 1
    again, _ = compiled_step()
    twice(again, draw(2, 3, 12, 16))
    assert len(races) == 1
    twice(again, draw(4, 3, 12, 16))
    assert len(races) == 2


def test_patches_that_are_large_are_not_made(
    races: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = used(monkeypatch)
    patches = 3 * 3 * 3 * (2 * 12 * 16) * 8  # bytes of those of the first convolution
    monkeypatch.setattr(convolutions, "_LARGEST", patches - 1)
    step, _ = compiled_step()
    twice(step, draw(2, 3, 12, 16))
    assert races == []
    monkeypatch.setattr(convolutions, "_LARGEST", patches)
    step, _ = compiled_step()
    twice(step, draw(2, 3, 12, 16))
    assert len(races) == targets().count(BY_PRODUCT) == 1


def test_a_deterministic_step_measures_nothing(
    races: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = used(monkeypatch)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        step, _ = compiled_step()
        twice(step, draw(2, 3, 12, 16))
    finally:
        torch.use_deterministic_algorithms(before)
    assert races == []
    assert set(targets()) == {CONVOLUTION_BACKWARD}


def test_the_faster_way_is_taken() -> None:
    """Each of two, made slow in turn."""
    import time

    def quick(inputs: list[Any]) -> list[Any]:
        return [inputs[0] + 1]

    def slow(inputs: list[Any]) -> list[Any]:
        time.sleep(2e-3)
        return quick(inputs)

    layouts = [((2, 4), (4, 1), torch.float32)]
    ways = {"usual": quick, "other": slow}
    for preferred in ways:
        assert measured._race(preferred, ways, layouts).order[0] == "usual"


def test_measuring_draws_no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    raced: list[Any] = []
    race = measured._race
    monkeypatch.setattr(measured, "choices", Choices(Memory, lambda: ""))
    monkeypatch.setattr(measured, "_race", lambda *given: raced.append(given) or race(*given))
    step, _ = compiled_step()
    torch.manual_seed(3)
    twice(step, draw(2, 3, 12, 16))
    first = torch.get_rng_state()
    assert raced
    step, _ = compiled_step()
    torch.manual_seed(3)
    twice(step, draw(2, 3, 12, 16))
    assert torch.equal(torch.get_rng_state(), first)


_POOL = """
import torch
from dynamo_backends import compile_step

layer = torch.nn.Conv2d(3, 4, 3)
optimizer = torch.optim.SGD(layer.parameters(), lr=1e-2)

def train(x):
    loss = torch.nn.functional.max_pool2d(layer(x)[0], 2).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

step = compile_step(train, model=layer, optimizer=optimizer, backend="inductor")
for _ in range(2):
    step(torch.randn(1, 3, 8, 8))
assert step.launches == 1
"""


@pytest.mark.long
def test_a_pool_is_the_first_thing_that_a_process_compiles() -> None:
    """One of three dimensions, which Inductor decomposes by a module that it has not loaded."""
    done = subprocess.run([sys.executable, "-c", _POOL], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
