"""The models are reproducible, and such that a wrong result cannot pass for a right one."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from harness import SUITES, ModelCase, check, find_case, find_cases, randomize_weights, suite

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported")

ALL = [
    pytest.param(case, id=f"{name}-{case.name}") for name in SUITES for case in suite(name, "test")
]


def weight_to_spoil(model: nn.Module) -> torch.Tensor:
    """The first matrix or filter: the farthest from the output."""
    return next(p for p in model.parameters() if p.dim() > 1)


@pytest.mark.parametrize("case", ALL)
@torch.no_grad()
def test_a_small_mistake_at_the_input_is_seen_at_the_output(case: ModelCase) -> None:
    model = case.make()
    spoiled = copy.deepcopy(model)
    weight = weight_to_spoil(spoiled)
    torch.manual_seed(0)
    weight *= 1 + 0.02 * torch.randn_like(weight)
    assert not check(model, spoiled, case.inputs()).passed


@pytest.mark.parametrize("name", ["mnasnet1_0", "bert"])
def test_models_are_the_same_every_time(name: str) -> None:
    case = find_case("classic", name, "test")
    torch.manual_seed(1)
    state = case.make().state_dict()
    torch.manual_seed(2)
    again = case.make().state_dict()
    assert state.keys() == again.keys()
    assert all(torch.equal(state[key], again[key]) for key in state)


def test_making_a_model_leaves_the_generator_alone() -> None:
    case = find_case("control_flow", "early_return", "test")
    before = torch.get_rng_state()
    case.make()
    case.inputs()
    assert torch.equal(torch.get_rng_state(), before)


def test_enlivened_statistics_do_not_cancel() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    x = torch.randn(4, 3, 9, 9)
    randomize_weights(model, lambda: model(x))
    norm: Any = model[1]
    assert not norm.training
    assert norm.momentum == 0.1
    assert norm.running_mean.abs().min() > 0
    assert norm.running_var.std() > 0
    assert norm.weight.std() > 0.1
    assert norm.bias.std() > 0.01


def test_names_are_unique() -> None:
    names = [case.name for name in SUITES for case in suite(name, "test")]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", SUITES)
def test_scales_have_the_same_models(name: str) -> None:
    assert [c.name for c in suite(name, "test")] == [c.name for c in suite(name, "bench")]


def test_unknown_names_get_help() -> None:
    with pytest.raises(ValueError, match="unknown suite 'clasic'; there are: classic, tr"):
        suite("clasic")
    with pytest.raises(ValueError, match=r"unknown model 'resnet8'\. Did you mean 'resnet18'\?"):
        find_cases(suite("classic"), ["resnet8"])
