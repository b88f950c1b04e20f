"""Compiled steps in threads, beside workers, and in a process that goes on where one stopped."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from dynamo_backends import compile_step
from tests.aot.step_loops import World, assert_equal, momentum, network


def _trained(backend: str | None, seed: int, steps: int = 6, workers: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    model = network()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, dtype=p.dtype, generator=generator) / 2)
    world = World(model, momentum(model.parameters()))
    world.data.weight = 1.0

    def function(x: Tensor, y: Tensor) -> Tensor:
        return world.update(world.loss(x, y) * world.data.weight)

    step: Any = function
    if backend is not None:
        step = compile_step(function, model=model, optimizer=world.optimizer, backend=backend)
    x = torch.randn(5 * steps, 4, dtype=torch.float64, generator=generator)
    y = torch.randint(0, 3, (5 * steps,), generator=generator)
    for batch in DataLoader(TensorDataset(x, y), batch_size=5, num_workers=workers):
        step(*batch)
        world.data.weight *= 0.9
    return [p.detach() for p in model.parameters()]


def test_two_threads_step_two_models() -> None:
    found: dict[int, list[Tensor]] = {}

    def train(seed: int) -> None:
        found[seed] = _trained("aot_eager", seed)

    threads = [threading.Thread(target=train, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in (1, 2):
        for now, expected in zip(found[seed], _trained(None, seed), strict=True):
            torch.testing.assert_close(now, expected, rtol=0, atol=1e-9)


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_batches_may_come_from_workers() -> None:
    found = _trained("aot_eager", 3, workers=1)
    for now, expected in zip(found, _trained(None, 3), strict=True):
        torch.testing.assert_close(now, expected, rtol=0, atol=1e-9)


_PROGRAM = """
import sys, torch
from tests.aot.step_loops import World, momentum, network, batches
from dynamo_backends import compile_step

def main(file, first, last, backend):
    torch.manual_seed(0)
    world = World(model := network(), momentum(model.parameters()))
    scheduler = torch.optim.lr_scheduler.StepLR(world.optimizer, 2, 0.5)
    if first:
        kept = torch.load(file)
        model.load_state_dict(kept["model"])
        world.optimizer.load_state_dict(kept["optimizer"])
        scheduler.load_state_dict(kept["scheduler"])

    def train(x, y):
        loss = world.update(world.loss(x, y))
        scheduler.step()
        return loss

    step = train
    if backend != "eager":
        step = compile_step(train, model=model, optimizer=world.optimizer, backend=backend)
    generator = torch.Generator().manual_seed(1)
    for i in range(last):
        batch = batches(i, generator)
        if i >= first:
            step(*batch)
    torch.save({"model": model.state_dict(), "optimizer": world.optimizer.state_dict(),
                "scheduler": scheduler.state_dict()}, file)
"""


@pytest.mark.long
def test_another_process_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    def run(*calls: str) -> None:
        program = "\n".join([_PROGRAM, *calls])
        subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])

    eager, step = tmp_path / "eager.pt", tmp_path / "step.pt"
    run(f"main({str(eager)!r}, 0, 6, 'eager')", f"main({str(step)!r}, 0, 3, 'aot_eager')")
    run(f"main({str(step)!r}, 3, 6, 'aot_eager')")
    expected, found = torch.load(eager), torch.load(step)
    assert found["scheduler"]["_last_lr"] == expected["scheduler"]["_last_lr"]
    for name, value in expected["model"].items():
        torch.testing.assert_close(found["model"][name], value, rtol=0, atol=1e-9)


def test_schedulers_may_come_first() -> None:
    def make(world: World) -> Any:
        scheduler = torch.optim.lr_scheduler.StepLR(world.optimizer, 2, 0.5)

        def function(x: Tensor, y: Tensor) -> Tensor:
            scheduler.step()
            return world.update(world.loss(x, y))

        return function

    with pytest.warns(UserWarning, match="before `optimizer.step"):
        step = assert_equal(make, backend="aot_eager")
    assert step.compilations == 1
