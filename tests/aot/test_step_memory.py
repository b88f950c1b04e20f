"""Parameters over memory that somebody else sees: each update arrives there, and nothing moves."""

import copy
import multiprocessing as mp
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dynamo_backends import compile_step

BACKENDS = ("openxla", "inductor", "onnxrt")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.BatchNorm1d(40), nn.Linear(40, 3))


Seen = dict[str, Callable[[], Tensor]]
"""How somebody else reads each parameter and buffer."""


def shared(model: nn.Module, _: Path) -> Seen:
    model.share_memory()
    return {}


def over_numpy(model: nn.Module, _: Path) -> Seen:
    arrays = {}
    for name, p in tensors(model):
        arrays[name] = np.array(p.detach().numpy())
        p.data = torch.from_numpy(arrays[name])
    return {name: lambda a=a: torch.from_numpy(a) for name, a in arrays.items()}  # type: ignore[misc]


def over_memmap(model: nn.Module, folder: Path) -> Seen:
    seen: Seen = {}
    for name, p in tensors(model):
        path, shape = folder / name, tuple(p.shape)
        array = np.memmap(path, p.detach().numpy().dtype, "w+", shape=shape)
        array[...] = p.detach().numpy()
        p.data = torch.from_numpy(array)
        seen[name] = lambda path=path, dtype=p.dtype, shape=shape: torch.from_file(  # type: ignore[misc]
            str(path), shared=True, size=int(np.prod(shape)), dtype=dtype
        ).view(shape)
    return seen


def over_file(model: nn.Module, folder: Path) -> Seen:
    seen: Seen = {}
    for name, p in tensors(model):
        path = str(folder / name)
        read = lambda path=path, p=p, shape=p.shape, dtype=p.dtype: torch.from_file(  # noqa: E731
            path, shared=True, size=p.numel(), dtype=dtype
        ).view(shape)
        mapped = read().copy_(p.detach())
        p.data = mapped
        seen[name] = read  # type: ignore[assignment]
    return seen


def in_flat_buffer(model: nn.Module, _: Path) -> Seen:
    parameters = list(model.named_parameters())
    flat = torch.cat([p.detach().flatten() for _, p in parameters])
    seen: Seen = {}
    start = 0
    for name, p in parameters:
        part = slice(start, start + p.numel())
        p.data = flat[part].view(p.shape)
        seen[name] = lambda part=part, shape=p.shape: flat[part].view(shape)  # type: ignore[misc]
        start = part.stop
    return seen


def with_numpy_views(model: nn.Module, _: Path) -> Seen:
    arrays = {name: p.detach().numpy() for name, p in tensors(model)}
    return {name: lambda a=a: torch.from_numpy(a) for name, a in arrays.items()}  # type: ignore[misc]


def in_capsules(model: nn.Module, _: Path) -> Seen:
    """numpy reads parameters by DLPack, which refers to the tensor and not to its storage."""
    arrays = {name: np.from_dlpack(p.data) for name, p in model.named_parameters()}
    return {name: lambda a=a: torch.from_numpy(a) for name, a in arrays.items()}  # type: ignore[misc]


def with_buffers_in_capsules(model: nn.Module, _: Path) -> Seen:
    arrays = {name: np.from_dlpack(b) for name, b in model.named_buffers() if b.ndim}
    return {name: lambda a=a: torch.from_numpy(a) for name, a in arrays.items()}  # type: ignore[misc]


def with_storages(model: nn.Module, _: Path) -> Seen:
    storages = {name: (p.untyped_storage(), p.shape, p.dtype) for name, p in tensors(model)}

    def read(name: str) -> Tensor:
        storage, shape, dtype = storages[name]
        return torch.empty(0, dtype=dtype).set_(storage).view(shape)

    return {name: lambda name=name: read(name) for name in storages}  # type: ignore[misc]


def tied(model: nn.Module, _: Path) -> Seen:
    model.register_parameter("again", nn.Parameter(model[0].weight.data))  # type: ignore[index]
    return {"0.weight": lambda: model.again.detach()}  # type: ignore[union-attr]


def tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


KINDS = (
    shared, over_numpy, over_memmap, over_file, in_flat_buffer, with_numpy_views, in_capsules,
    with_buffers_in_capsules, with_storages, tied,
)  # fmt: skip


def trained(model: nn.Module, backend: str | None) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def function(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if backend is None:
        return function
    return compile_step(function, model=model, optimizer=optimizer, backend=backend)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_that_others_see_is_updated(backend: str, kind: Any, tmp_path: Path):
    reference, model = net(), net()
    seen = kind(model, tmp_path)
    if kind is tied:
        reference.register_parameter("again", nn.Parameter(reference[0].weight.data))
    addresses = {name: t.data_ptr() for name, t in tensors(model)}
    are_shared = {name: t.is_shared() for name, t in tensors(model)}
    eager, step = trained(reference, None), trained(model, backend)
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    expected = dict(tensors(reference))
    for _ in range(3):
        torch.testing.assert_close(step(x, y), eager(x, y))
        for name, t in tensors(model):
            torch.testing.assert_close(t, expected[name], rtol=1e-4, atol=1e-6)
        for name, read in seen.items():
            torch.testing.assert_close(read(), expected[name].detach(), rtol=1e-4, atol=1e-6)
        for name, t in tensors(model):
            if seen.keys() >= {name} or kind is shared:
                assert t.data_ptr() == addresses[name], name
            assert t.is_shared() == are_shared[name], name
    assert (step.eager_steps, step.refusals) == (1, {})
    with torch.no_grad():  # and what others write is read
        for t in (reference, model):
            t[0].weight.mul_(0.5)  # type: ignore[index,union-attr]
    torch.testing.assert_close(step(x, y), eager(x, y))


def _read(model: nn.Module, asked: Any, answers: Any) -> None:
    while asked.get():
        answers.put({name: p.detach().numpy().copy() for name, p in model.named_parameters()})


@pytest.mark.parametrize("backend", ["openxla"])
def test_another_process_sees_each_update(backend: str):
    """An actor that plays with the policy that is being trained."""
    model = net()
    model.share_memory()
    context = mp.get_context("fork")
    asked, answers = context.Queue(), context.Queue()
    actor = context.Process(target=_read, args=(model, asked, answers), daemon=True)
    actor.start()
    try:
        step = trained(model, backend)
        for _ in range(2):
            step(torch.randn(8, 4), torch.randint(0, 3, (8,)))
            asked.put(True)
            for name, found in answers.get(timeout=60).items():
                expected = copy.deepcopy(model.get_parameter(name).detach())
                torch.testing.assert_close(torch.from_numpy(found), expected, rtol=0, atol=0)
    finally:
        asked.put(False)
        actor.join(60)
