"""What every backend has to do right."""

import pytest
import torch
from torch import nn

from dynamo_backends.conformance.weights.changes import CHANGES
from tests import backend_checks
from tests.trt.conftest import Machine


@pytest.mark.parametrize("name", list(backend_checks.SEMANTICS))
def test_semantics(machine: Machine, name: str):
    fn, inputs = backend_checks.SEMANTICS[name]
    with machine.device:  # for the tensors that functions make
        reports = backend_checks.agree("tensorrt", fn, *inputs())
    # TensorRT does not compute with complex numbers.
    assert backend_checks.ran_on_backend(reports) or name == "conjugated"


def test_weights_are_never_stale(double: Machine):
    changes = list(CHANGES)
    rebinds = backend_checks.never_stale("tensorrt", changes)
    assert rebinds >= 4
    assert len(double.log.builds) == 1
    assert len(double.log.refits) > rebinds


def test_a_dynamic_batch_has_one_engine(double: Machine):
    backend_checks.follows_the_batch("tensorrt")
    assert len(double.log.builds) == 1


def test_gradients(double: Machine):
    backend_checks.gradients_agree("tensorrt")
    assert double.log.runs == 2


def test_freezing_off_makes_weights_ordinary_inputs(double: Machine):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Tanh()).eval(), torch.randn(2, 4)
    with torch.no_grad():
        compiled = torch.compile(model, backend="tensorrt", options={"freezing": "off"})
        for _ in range(2):
            torch.testing.assert_close(compiled(x), model(x))
            model[0].weight.mul_(2)
    assert double.log.refits == []
