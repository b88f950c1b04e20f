"""A second process finds the first one's steps on disk."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import dynamo_backends
from dynamo_backends.runtime.cache import cache_folder
from tests.aot import step_nets as nets


def train(cache: bool = True) -> tuple[int, int, list[float]]:
    """Two steps: how many executables were made or loaded, how many loaded, and the losses."""
    torch.manual_seed(0)
    model = nets.mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def function(x: Tensor, y: Tensor) -> Tensor:
        loss = nets.entropy(model, (x, y))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = dynamo_backends.compile_step(
        function, model=model, optimizer=optimizer, options={"cache": cache}
    )
    with dynamo_backends.record() as reports:
        losses = [step(*batch).item() for batch in nets.rows(2)]
    return sum(r.executables for r in reports), sum(r.cache_hits for r in reports), losses


def entries() -> list[Path]:
    return sorted(cache_folder().glob("*.bin"))


def test_a_second_process_loads_the_step() -> None:
    ours = train()
    assert ours[:2] == (1, 0)
    assert len(entries()) == 1
    code = "from tests.aot.test_step_cache import train; print(*train())"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["1", "1", *str(ours[2]).split()], done.stderr
    assert len(entries()) == 1


@pytest.mark.long
def test_a_damaged_file_is_made_anew() -> None:
    ours = train()
    (entry,) = entries()
    whole = entry.read_bytes()
    entry.write_bytes(whole[:-100] + bytes(100))
    assert train() == ours, "not loaded, and right"
    assert train() == (1, 1, ours[2]), "it is whole again"


def test_without_the_option_nothing_is_kept() -> None:
    assert train(cache=False)[:2] == (1, 0)
    assert entries() == []
