"""Steps by replay on each backend: memory that others see, containers, and eager's errors."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynamo_backends import compile_step

BACKENDS = ("openxla", "onnxrt", "inductor", "aot_eager")

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0, 1, 2])


def trained(model: nn.Module, backend: str | None, result: Any = None) -> Any:
    """A step of SGD with momentum, and its result in a container."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(x: Tensor, y: Tensor) -> Any:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss if result is None else result(loss)

    if backend is None:
        return step
    return compile_step(step, model=model, optimizer=optimizer, backend=backend, python="replay")


def pair() -> tuple[nn.Linear, nn.Linear]:
    """Two layers with equal weights."""
    torch.manual_seed(0)
    ours, theirs = nn.Linear(4, 3), nn.Linear(4, 3)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def shared(layer: nn.Linear, folder: Path) -> Any:
    layer.share_memory()
    return layer.weight.detach()


def of_numpy(layer: nn.Linear, folder: Path) -> Any:
    array = layer.weight.detach().numpy().copy()
    layer.weight = nn.Parameter(torch.from_numpy(array))
    return array


def mapped(layer: nn.Linear, folder: Path) -> Any:
    path = folder / "weight"
    layer.weight.detach().numpy().tofile(path)
    layer.weight = nn.Parameter(torch.from_file(str(path), shared=True, size=12).view(3, 4))
    return numpy.memmap(path, dtype=numpy.float32, shape=(3, 4))


def flat(layer: nn.Linear, folder: Path) -> Any:
    buffer = torch.cat([layer.weight.detach().flatten(), layer.bias.detach()])
    layer.weight.data, layer.bias.data = buffer[:12].view(3, 4), buffer[12:]
    return buffer[:12].view(3, 4)


@pytest.mark.parametrize("memory", [shared, of_numpy, mapped, flat])
@pytest.mark.parametrize("backend", BACKENDS)
def test_others_see_each_update_of_a_weight(backend: str, memory: Any, tmp_path: Path) -> None:
    ours, theirs = pair()
    seen = memory(ours, tmp_path)
    address, is_shared = ours.weight.data_ptr(), ours.weight.is_shared()
    step, eager = trained(ours, backend), trained(theirs, None)
    for _ in range(4):
        torch.testing.assert_close(step(X, Y), eager(X, Y))
        torch.testing.assert_close(torch.as_tensor(seen).clone(), theirs.weight.detach())
        assert (ours.weight.data_ptr(), ours.weight.is_shared()) == (address, is_shared)
    assert step.eager_steps == 1


@dataclasses.dataclass
class Output:
    """A result with a number."""

    loss: Tensor
    number: int = 3


class Holder:
    """An object that a step makes."""

    def __init__(self, loss: Tensor) -> None:
        self.values = [loss]


CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dataclass": (Output, lambda x: x.loss),
    "namespace": (lambda loss: SimpleNamespace(loss=loss), lambda x: x.loss),
    "set": (lambda loss: {loss}, lambda x: next(iter(x))),
    "nested": (lambda loss: {"k": frozenset([loss])}, lambda x: next(iter(x["k"]))),
    "object": (Holder, lambda x: x.values[0]),
    "iterator": (lambda loss: iter([loss]), next),
    "closure": (lambda loss: lambda: loss, lambda x: x()),
}


@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_result_may_be_in_any_container(backend: str, name: str) -> None:
    make, get = CONTAINERS[name]
    ours, theirs = pair()
    step, eager = trained(ours, backend, make), trained(theirs, None)
    for _ in range(3):
        result = get(step(X, Y))
        assert type(result) is Tensor
        torch.testing.assert_close(result.detach(), eager(X, Y).detach())


BATCHES: dict[str, tuple[Tensor, Tensor]] = {
    "dtype": (X.double(), Y),
    "a label out of range": (X, Y + 1),
    "shape": (X[:, :3], Y),
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_that_eager_refuses_is_refused_alike(backend: str, name: str) -> None:
    ours, theirs = pair()
    step, eager = trained(ours, backend), trained(theirs, None)
    for _ in range(3):
        torch.testing.assert_close(step(X, Y), eager(X, Y))
    with pytest.raises((RuntimeError, IndexError)) as expected:
        eager(*BATCHES[name])
    with pytest.raises(type(expected.value)) as found:
        step(*BATCHES[name])
    assert str(found.value).split("\n")[0] == str(expected.value).split("\n")[0]
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    torch.testing.assert_close(step(X, Y), eager(X, Y))


@pytest.mark.parametrize("is_same", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_arguments_may_overlap_at_some_calls(backend: str, is_same: bool) -> None:
    ours, theirs = pair()
    runs = []
    for model in (ours, theirs):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(a: Tensor, b: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            a.add_(1)
            loss = model(a).sum() + model(b).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        settings: Any = {"backend": backend, "python": "replay", "fallback": "split"}
        is_ours = model is ours
        compiled = compile_step(step, model=model, optimizer=optimizer, **settings)
        runs.append(compiled if is_ours else step)
    for i in range(6):
        memories = [torch.arange(40.0).sin() for _ in range(2)]
        results = []
        for run, memory in zip(runs, memories, strict=True):
            first = memory[:24].view(6, 4)
            second = first if is_same else memory[8:32].view(6, 4)
            pair_of_call = (first, second) if i % 2 else (first.clone(), second.clone())
            results.append(run(*pair_of_call))
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*memories)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
