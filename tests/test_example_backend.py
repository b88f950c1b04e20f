"""The backend that readers copy runs, trains, sees changed weights, falls back, and is short."""

import ast
import copy
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends.interface import registry
from tests.bench.programs import ROOT, load
from tests.checking import assert_same

EXAMPLE = "examples/backend_in_60_lines.py"


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_registered", dict(registry._registered))
        yield load(EXAMPLE)
    registry.get_backend.cache_clear()


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))


def test_a_reader_sees_that_it_works():
    done = subprocess.run([sys.executable, ROOT / EXAMPLE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    assert done.stdout.startswith(
        "results are eager's: True\n"
        "and after a weight has changed: True\n"
        "gradients are eager's: True\n"
        "Sequential with numpy: 1 graph, "
    )
    assert "parts, with their operators: numpy 6 | eager 1 | numpy 1\n" in done.stdout
    assert "in eager: aten.gelu.default (1 call): the table has no row for it\n" in done.stdout


def test_it_has_60_lines():
    source = (ROOT / EXAMPLE).read_text(encoding="utf-8")
    docstring = ast.parse(source).body[0]
    code = [line for line in source.splitlines()[docstring.end_lineno :] if line.strip()]
    assert len(code) <= 60


@pytest.mark.parametrize("x", [torch.randn(3, 4), torch.randn(4, 5).t(), torch.zeros(0, 4)])
def test_results_are_eagers(example: ModuleType, x: Tensor):
    model = net()
    compiled = torch.compile(model, backend=example.on_numpy)
    with torch.no_grad(), dynamo_backends.record() as reports:
        assert_same(model(x), compiled(x), copy.deepcopy(model).double()(x.double()))
    assert [(r.ops_on_backend, r.blocks) for r in reports] == [(7, 2)]


def test_weights_are_prepared_once_and_again_when_they_have_changed(example: ModuleType):
    model, x = net(), torch.randn(3, 4)
    compiled = torch.compile(model, backend=example.on_numpy)
    with torch.no_grad(), dynamo_backends.record() as reports:
        compiled(x), compiled(x)
        assert reports[0].rebinds == 0
        model[0].weight.mul_(2)
        torch.testing.assert_close(compiled(x), model(x))
        assert reports[0].rebinds == 1
        model[0].bias.add_(1)  # which is not copied, so there is nothing to prepare
        torch.testing.assert_close(compiled(x), model(x))
        assert reports[0].rebinds == 1


def test_training_is_eagers(example: ModuleType):
    model, x, y = net(), torch.randn(16, 4), torch.randn(16, 1)
    theirs = copy.deepcopy(model)
    losses = []
    for each in (torch.compile(model, backend=example.on_numpy), theirs):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(5):
            loss = nn.functional.mse_loss(each(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss)
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(list(model.parameters()), list(theirs.parameters()))


def test_what_it_does_not_take_says_why(example: ModuleType):
    model, x = net(), torch.randn(3, 4)
    with torch.no_grad(), dynamo_backends.record() as reports:
        torch.compile(model, backend=example.on_numpy)(x)
        torch.compile(model.double(), backend=example.on_numpy)(x.double())
    assert [(f.op, f.reason) for f in reports[0].fallbacks] == [
        ("aten.gelu.default", "the table has no row for it")
    ]
    assert reports[1].ops_on_backend == 0
    reasons = {f.op: f.reason for f in reports[1].fallbacks}
    assert reasons["aten.tanh.default"] == "the table is not for torch.float64 on cpu"
