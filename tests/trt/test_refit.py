"""Weights: given to engines, changed, and those that the parser combines."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dynamo_backends.trt.engine import Engine
from tests.checking import check
from tests.trt.conftest import ALL, Machine
from tests.trt.helpers import compiled, executable, net, reasons


@pytest.mark.parametrize("machine", ALL, indirect=True)
def test_changed_weights_are_refitted_not_rebuilt(machine: Machine):
    model, x = net().to(machine.device), torch.randn(4, 6, device=machine.device)
    run, report = compiled(model, x)
    with torch.no_grad():
        for i in range(3):
            model[0].weight.mul_(1.5)
            model[2].bias.add_(1)
            for _ in range(2):
                torch.testing.assert_close(run(x), model(x))
            assert report.rebinds == executable(report).program.refits == i + 1
    if machine.log is not None:
        assert len(machine.log.builds) == machine.log.loads == machine.log.contexts == 1
        assert machine.log.refits == [["arg0_1", "arg1_1", "arg3_1", "arg4_1"]] * 4
    assert report.runtime_fallbacks == []


def test_instances_of_a_module_have_engines_of_their_own(double: Machine):
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ self.weight) + 1

    first, second, x = Block(), Block(), torch.randn(3, 6)
    run = torch.compile(lambda module, x: module(x), backend="tensorrt")
    with torch.no_grad():
        for _ in range(2):
            for module in (first, second):
                torch.testing.assert_close(run(module, x), module(x))
        first.weight.add_(1)
        for module in (second, first, second):
            torch.testing.assert_close(run(module, x), module(x))
    assert len(double.log.builds) == 1
    assert double.log.loads == 2
    assert len(double.log.refits) == 3


def test_replaced_weights_take_over_the_engine(double: Machine):
    model, x = net(), torch.randn(4, 6)
    run, _ = compiled(model, x)
    with torch.no_grad():
        for _ in range(3):
            model[0].weight = nn.Parameter(torch.randn(8, 6))
            model[2].weight.data = torch.randn(3, 8)
            torch.testing.assert_close(run(x), model(x))
    assert len(double.log.builds) == 1
    assert double.log.loads <= 2


def test_weights_that_the_parser_combines(machine: Machine, strict_memory: None):
    """A batch normalisation that follows no convolution."""
    model = nn.Sequential(nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).eval().to(machine.device)
    x = torch.randn(4, 6, device=machine.device)
    run, report = compiled(model, x)
    with torch.no_grad():
        model[0].running_mean.add_(1)
        model[0].weight.mul_(3)
        torch.testing.assert_close(run(x), model(x))
    assert report.fallbacks == ()
    assert report.runtime_fallbacks == []
    if machine.log is not None:
        assert len(machine.log.builds) == 1


def test_the_parser_puts_weights_where_it_needs_them(double: Machine):
    """`BatchNormalization` itself, which torch's graphs rarely have."""
    from tests.trt.onnx_models import batch_norm

    settings, model, weights = batch_norm()
    from dynamo_backends.trt.engine_builder import build

    engine = Engine(build(model, {}, settings), model, settings)
    for factor in (1.0, 2.0):
        given = {name: tensor * factor for name, tensor in weights.items()}
        engine.refit(given)
    assert double.log.refits == [sorted(weights)] * 2


def test_a_refused_weight_is_an_error_and_never_an_old_result(
    double: Machine, monkeypatch: pytest.MonkeyPatch
):
    import sys

    model, x = net(), torch.randn(4, 6)
    run, report = compiled(model, x)
    refitter = sys.modules["tensorrt"].Refitter
    monkeypatch.setattr(refitter, "refit_cuda_engine_async", lambda self, stream: False)
    with torch.no_grad():
        model[0].weight.mul_(2)
        torch.testing.assert_close(run(x), model(x))
    assert "TensorRT cannot refit the engine with new weights" in report.runtime_fallbacks[0]


def test_weights_that_are_no_floating_point_numbers(double: Machine):
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("positions", torch.tensor([3, 1, 0, 1]))
            self.register_buffer("mask", torch.tensor([True, False, True, True]))

        def forward(self, x: Tensor) -> Tensor:
            y = (x + 1)[self.positions]
            return torch.where(self.mask[:, None], y, y * 2)

    model, x = Masked().eval(), torch.randn(4, 6)
    run, report = compiled(model, x)
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))
        model.mask.logical_not_()
        model.positions.copy_(torch.tensor([2, 2, 0, 3]))
        torch.testing.assert_close(run(x), model(x))
    assert reasons([report]) == {}
    assert report.runtime_fallbacks == []
    assert double.log.refits == []
    assert report.rebinds == 0  # they are read where they are


def test_what_depends_on_weights_alone_is_computed_once(double: Machine):
    def fn(x: Tensor, module: nn.Module) -> Tensor:
        return (x @ (module.weight.t().exp() * 2)).relu()

    module, x = nn.Linear(5, 4), torch.randn(3, 5)
    run, report = compiled(fn, x, module)
    ran = executable(report)
    assert [str(n.target) for n in ran.graph.calls] == ["aten.mm.default", "aten.relu.default"]
    with torch.no_grad():
        module.weight.sub_(1)
        torch.testing.assert_close(run(x, module), fn(x, module))
    assert len(double.log.builds) == 1


def test_threads_and_changing_weights(double: Machine):
    model, inputs = net(), [torch.randn(4, 6) for _ in range(4)]
    run, report = compiled(model, inputs[0])
    with torch.no_grad():
        expected = [model(x) for x in inputs]
    failures: list[Any] = []

    def work(i: int) -> None:
        try:
            with torch.no_grad():
                for _ in range(20):
                    torch.testing.assert_close(run(inputs[i]), expected[i])
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert report.runtime_fallbacks == []
    assert double.log.runs == 1 + 80
    assert double.log.contexts <= 1 + 4


def test_verification(double: Machine):
    check(lambda x: (x.sin() * 2).relu(), torch.randn(9), backend="tensorrt", verify=True)
