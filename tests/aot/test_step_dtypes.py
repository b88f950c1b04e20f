"""Arguments whose dtypes eager refuses: its error, and nothing has changed."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dynamo_backends import compile_step

KINDS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (lambda: nn.Linear(4, 3), torch.ones(2, 4).double()),
    "linear of half": (lambda: nn.Linear(4, 3), torch.ones(2, 4).half()),
    "linear of integers": (lambda: nn.Linear(4, 3), torch.ones(2, 4).long()),
    "batched": (lambda: nn.Linear(4, 3, bias=False), torch.ones(2, 2, 4).double()),
    "convolution": (lambda: nn.Conv1d(4, 3, 1), torch.ones(2, 4, 5).double()),
    "convolution, no bias": (lambda: nn.Conv1d(4, 3, 1, bias=False), torch.ones(2, 4, 5).double()),
    "layer norm": (lambda: nn.LayerNorm(4), torch.ones(2, 4).double()),
    "batch norm": (lambda: nn.BatchNorm1d(4), torch.ones(2, 4).double()),
    "group norm": (lambda: nn.GroupNorm(2, 4), torch.ones(2, 4).double()),
    "prelu": (lambda: nn.PReLU(), torch.ones(2, 4).double()),
    "float rows": (lambda: nn.Embedding(4, 3), torch.ones(2)),
}


def refused(function: Callable[..., Any], *args: Any) -> Exception:
    with pytest.raises((RuntimeError, TypeError)) as found:
        function(*args)
    return found.value


def step_of(
    model: nn.Module, loss: Callable[..., Tensor], backend: str | None = None
) -> Callable[..., Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def function(*batch: Tensor) -> Tensor:
        value = loss(model(batch[0]), *batch[1:])
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    if backend is None:
        return function
    return compile_step(function, model=model, optimizer=optimizer, backend=backend)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["openxla", "inductor", "onnxrt"])
@pytest.mark.parametrize("later", [False, True])
def test_eagers_error_for_dtypes_is_raised(backend: str, kind: str, later: bool):
    if later and backend == "onnxrt" and kind.startswith("convolution"):
        pytest.skip("ONNX has no gradients of convolutions")
    make, x = KINDS[kind]
    model = make()
    good = x.long() % 2 if kind == "float rows" else torch.randn(x.shape)
    loss = lambda y: y.square().mean()  # noqa: E731
    eagers = copy.deepcopy(model)
    eager, step = step_of(eagers, loss), step_of(model, loss, backend)
    for _ in range(2 if later else 0):
        torch.testing.assert_close(step(good), eager(good))
    parameters = copy.deepcopy(list(model.parameters()))
    expected, found = refused(eager, x), refused(step, x)
    assert (type(found), str(found)) == (type(expected), str(expected))
    torch.testing.assert_close(list(model.parameters()), parameters, rtol=0, atol=0)
    # Batch norm counts its batches before it looks at them.
    torch.testing.assert_close(dict(model.named_buffers()), dict(eagers.named_buffers()))
    torch.testing.assert_close(step(good), eager(good))
    torch.testing.assert_close(model.state_dict(), eagers.state_dict())
    assert step.launches == (2 if later else 0)
    assert step.refusals == {}


def test_a_later_batch_of_another_dtype_is_refused():
    model = nn.Linear(4, 3)
    step = step_of(model, F.cross_entropy, "openxla")
    x, y = torch.randn(2, 4), torch.tensor([0, 2])
    step(x, y)
    before = copy.deepcopy(model.state_dict())
    eager = step_of(copy.deepcopy(model), F.cross_entropy)
    for batch in ((x.double(), y), (x, y.int())):  # each torch has its own words
        assert str(refused(step, *batch)) == str(refused(eager, *batch))
    assert torch.equal(model.weight, before["weight"])
    eager = copy.deepcopy(model)
    torch.testing.assert_close(step(x, y), step_of(eager, F.cross_entropy)(x, y))
    torch.testing.assert_close(model.weight, eager.weight)


@pytest.mark.parametrize("kind", ["linear", "layer norm", "batch norm", "group norm"])
@pytest.mark.parametrize("grad", [False, True])
def test_compiled_models_raise_eagers_error_for_dtypes(kind: str, grad: bool):
    make, x = KINDS[kind]
    model = make()
    with torch.set_grad_enabled(grad):
        expected = refused(model, x)
        found = refused(torch.compile(model, backend="openxla"), x)
    assert (type(found), str(found)) == (type(expected), str(expected))


def test_dtypes_that_eager_mixes_are_taken():
    model = nn.RMSNorm(4)
    eager = copy.deepcopy(model)
    x = torch.randn(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for train in (step_of(eager, torch.mean), step_of(model, torch.mean, "openxla")):
            train(x)
    torch.testing.assert_close(model.weight, eager.weight)
