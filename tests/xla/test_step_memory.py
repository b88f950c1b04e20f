"""Temporary memory of a training step on a CPU: new values are written over the old ones."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dynamo_backends import compile_step
from dynamo_backends.xla import _jaxlib


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_updates_that_are_withheld_on_an_error_copy_no_state(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    """An index out of range leaves the state as it was, which takes no copy of it."""
    programs: list[Any] = []
    compile_any = _jaxlib._compile

    def compile_and_keep(*args: Any) -> Any:
        programs.append(compile_any(*args))
        return programs[-1]

    monkeypatch.setattr(_jaxlib, "_compile", compile_and_keep)
    torch.manual_seed(0)
    table = torch.arange(4000)
    model = nn.Sequential(nn.Embedding(2000, 64), nn.Linear(64, 4))
    settings = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, **settings)

    def train(ids: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(table[ids]).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = compile_step(train, model=model, optimizer=optimizer, backend="openxla")
    ids = torch.randint(2000, (8,))
    for _ in range(3):
        step(ids)
    weight = model[0].weight
    temporary = max(p.get_compiled_memory_stats().temp_size_in_bytes for p in programs)
    assert temporary < 1.5 * weight.nbytes  # the gradient, and what is small
    before = [t.clone() for t in (weight, *optimizer.state[weight].values())]
    with pytest.raises(IndexError):
        step(ids + 2000)
    assert all(map(torch.equal, before, (weight, *optimizer.state[weight].values())))
