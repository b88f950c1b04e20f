"""Smaller versions of models: two blocks alike are left of many."""

from typing import Any

import torch
from torch import Tensor, nn

from dynamo_backends.bench.suites import find_case
from dynamo_backends.bench.suites.smaller import shorten


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


def test_two_of_the_blocks_alike_in_a_row_are_left():
    model = nn.Sequential(*(Block(width) for width in (4, 4, 4, 4, 8, 4)))
    kept = [model[i] for i in (0, 1, 4, 5)]
    shorten(model)
    assert list(model) == kept


def test_single_layers_are_left_alone():
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))  # such as what runs beside each other
    shorten(model)
    assert len(model) == 5


def test_a_shortened_model_runs():
    case = find_case("classic", "resnet50", "test")
    model: Any = case.build().eval()
    shorten(model)
    assert [len(x) for x in (model.layer1, model.layer2, model.layer3, model.layer4)] == [3] * 4
    with torch.no_grad():
        assert model(*case.inputs()).shape == (4, 1000)
