"""Training steps on a device against those by hand: the formulas, the transfers, the verdict."""

from typing import Any

import pytest
import torch.nn.functional as F

from tests.bench.programs import load

SIZES = ["--layers", "1", "--width", "16", "--heads", "2", "--length", "8", "--vocabulary", "20"]

program = load("benchmarks/device_steps.py")


def test_the_hand_written_loop_has_torchs_formulas() -> None:
    settings = program.parse([*SIZES, "--batch", "2"])
    batches = program.make_batches(settings)
    model, optimizer = program.make_model(settings)
    for group in optimizer.param_groups:
        group["lr"] = 1e-2  # so that the losses change
    found = program.hand_written_loop(model, optimizer, batches)
    for turn in range(3):
        for ids, targets in batches:
            loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert next(found) == pytest.approx(loss.item(), rel=2e-4), turn
    assert loss.item() < 2.5


def test_transfers_and_losses_are_as_they_should_be(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PJRT_NPROC", "1")
    program.main([*SIZES, "--batch", "2", "--rounds", "1"])
    out = capsys.readouterr().out
    assert "50 steps: 100 uploads, 5 downloads" in out
    assert "a loss is" not in out


def record(**changed: Any) -> dict[str, Any]:
    losses = [3.0, 2.9, 2.8, 2.7, 2.6]
    return {
        "ratio": 0.96,
        "losses": {program.OURS: losses, program.BY_HAND: [x * 1.0001 for x in losses]},
        "uploads": [[4, 64]] * 100,
        "downloads": [[]] * 5,
        **changed,
    }


def test_what_is_missed_is_named() -> None:
    def problems(**changed: Any) -> list[str]:
        found: list[str] = program.problems(record(**changed), (4, 64))
        return found

    assert problems() == []
    (slow,) = problems(ratio=0.94)
    assert "0.94 times as fast as jax.jit by hand; at least 0.95 is wanted" in slow
    (wrong,) = problems(losses={program.OURS: [1.0], program.BY_HAND: [1.1]})
    assert wrong == "a loss is 1.0, and 1.1 by hand"
    (nan,) = problems(losses={program.OURS: [float("nan")], program.BY_HAND: [1.1]})
    assert "a loss is nan" in nan
    (up,) = problems(uploads=[[4, 64]] * 99 + [[16, 16]])
    assert up == "100 uploads, 1 of them no batches; the batches are 100"
    (down,) = problems(downloads=[[]] * 6)
    assert down == "6 downloads; 5 losses were read"
