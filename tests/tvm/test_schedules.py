"""Tiles of contractions, and that scheduled programs are right for awkward sizes."""

import pytest
import torch
from torch import nn

from dynamo_backends.tvm import schedules
from dynamo_backends.tvm.tiling import tile_sizes
from tests.checking import check


@pytest.mark.parametrize(
    ("rows", "columns", "lanes", "expected"),
    [
        (56, 64, 16, (4, 64)),
        (49, 512, 16, (7, 32)),
        (788, 3072, 16, (4, 64)),
        (7, 4, 16, (7, 4)),
        (56, 64, 8, (4, 16)),
    ],
)
def test_a_tile_divides_the_output_and_fits_into_registers(
    rows: int, columns: int, lanes: int, expected: tuple[int, int]
):
    height, width = tile_sizes(rows, columns, lanes)[0]
    assert (height, width) == expected
    assert rows % height == 0
    assert columns % width == 0
    assert height * -(-width // lanes) <= (28 if lanes >= 16 else 12)
    assert height * width <= 256


def test_there_is_no_tile_of_a_prime_number_of_columns():
    with pytest.raises(ValueError, match="197 columns do not make whole vectors"):
        tile_sizes(64, 197, 16)


def test_a_convolution_is_tiled_and_its_activation_done_on_the_tile(
    monkeypatch: pytest.MonkeyPatch,
):
    made = []
    original = schedules._tiled

    def watch(plan: object, *args: object) -> object:
        made.append(original(plan, *args))
        return made[-1]

    monkeypatch.setattr(schedules, "_tiled", watch)
    model = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten(2)).eval()
    with torch.no_grad():
        check(model, torch.randn(2, 8, 6, 6), backend="tvm", cache=False)
    text = made[-1].mod.script()
    assert "T.vectorized" in text
    assert "T.unroll" in text


@pytest.mark.parametrize(
    ("channels", "out", "size", "kernel", "settings"),
    [
        (3, 20, 9, 3, {"stride": 2, "padding": 1}),
        (6, 7, 5, 1, {}),
        (8, 8, 7, 3, {"groups": 8, "padding": 1}),
        (8, 12, 6, 3, {"groups": 4, "dilation": 2, "padding": 2}),
    ],
)
def test_convolutions_of_awkward_sizes(
    channels: int, out: int, size: int, kernel: int, settings: dict[str, int]
):
    model = nn.Sequential(nn.Conv2d(channels, out, kernel, **settings), nn.SiLU(), nn.Flatten(2))
    with torch.no_grad():
        check(model.eval(), torch.randn(2, channels, size, size), backend="tvm", cache=False)


@pytest.mark.parametrize("shape", [(5, 37, 11), (1, 64, 64), (16, 1, 33), (7, 40, 13)])
def test_products_of_awkward_sizes(shape: tuple[int, int, int]):
    m, k, n = shape

    def fn(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (a @ b).relu(), b.t() @ a.t(), torch.stack([a, a]) @ torch.stack([b, b])

    check(fn, torch.randn(m, k), torch.randn(k, n), backend="tvm", cache=False)
