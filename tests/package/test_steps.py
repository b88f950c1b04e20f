"""Training steps in files: they go on as the step that was saved would have gone on."""

import copy
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynamo_backends import LoadedStep, PackageError, SaveError, compile_step, load_step
from dynamo_backends.cli.main import main
from tests.package.trained_steps import (
    OPTIMIZERS,
    Net,
    Training,
    batches,
    go_on,
    is_same,
    plain,
    simple,
    update,
)


@pytest.fixture(scope="module", params=[("openxla", "replay"), ("aot_eager", "replay")])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    backend, python = request.param
    training = Training(backend, python=python)
    path = tmp_path_factory.mktemp("steps") / "step.dbp"
    training.step.save(path)
    return training, path


def test_a_loaded_step_goes_on_to_the_bit(saved: tuple[Training, Path]):
    training, path = saved
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = load_step(path, strict=True)
    is_same(loaded.state_dict(), training.state())
    with torch.autocast("cpu", torch.bfloat16):  # which is not the step's
        ours = go_on(loaded, loaded.param_groups)
    theirs = go_on(training.step, training.optimizer.param_groups)
    is_same(ours, theirs)
    is_same(loaded.state_dict(), training.state())
    assert loaded.param_groups[0]["lr"] == 2e-3
    assert loaded.reports[0].cache_hits == (loaded.backend == "openxla")


def test_a_step_that_came_from_the_disk_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DYNAMO_BACKENDS_CACHE", str(tmp_path / "cache"))
    first, training = Training("openxla"), Training("openxla")
    assert [t.step.reports[0].cache_hits for t in (first, training)] == [0, 1]
    training.step.save(tmp_path / "step.dbp")
    loaded = load_step(tmp_path / "step.dbp", strict=True)
    is_same(go_on(loaded, [{}]), go_on(training.step, [{}]))
    is_same(loaded.state_dict(), training.state())


def test_what_commands_say_of_a_step(step_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", str(step_path)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"training step +Training\.function\n", said)
    assert re.search(r"called with +float32\[4, 3, 6, 6\], int64\[4\]\n", said)
    assert re.search(r"executables +1, ", said)
    assert main(["verify", str(step_path)]) == 0
    assert "the training step can run on openxla, with 1 executable" in capsys.readouterr().out


def test_training_goes_on_in_pytorch_and_comes_back(step_path: Path):
    loaded = load_step(step_path)
    model = Net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    state = loaded.state_dict()
    before = copy.deepcopy(state)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = compile_step(
        lambda x, y: _loss(model, optimizer, x, y), model=model, optimizer=optimizer,
        python="replay",
    )  # fmt: skip
    for batch in batches(2):
        step(*batch)
    other = load_step(step_path)
    other.load_state_dict({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    torch.manual_seed(1)
    expected = [step(*batch) for batch in batches(2)]
    torch.manual_seed(1)
    found = [other(*batch)["loss"] for batch in batches(2)]
    torch.testing.assert_close(found, expected)
    is_same(loaded.state_dict(), before)  # it has given away a copy


def _loss(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def test_every_step_is_compared_where_that_was_asked(tmp_path: Path):
    step = simple(plain, "openxla", options={"verify": "always"})
    step(torch.rand(2, 3))
    step.save(tmp_path / "step.dbp")
    loaded = load_step(tmp_path / "step.dbp", strict=True)
    for count in (1, 2):
        loaded(torch.rand(2, 3))
        assert loaded.reports[0].verified == count


def test_what_the_next_step_would_be_is_saved_or_nothing(tmp_path: Path):
    training = Training("aot_eager", "sgd")
    training.optimizer.param_groups[0]["nesterov"] = True
    with pytest.raises(SaveError, match="the next call would run a different program: a setting"):
        training.step.save(tmp_path / "step.dbp")
    training.step(*next(batches(1)))
    training.step.save(tmp_path / "step.dbp")
    loaded = load_step(tmp_path / "step.dbp")  # was captured where there were gradients
    assert loaded.param_groups[0]["nesterov"]
    is_same(go_on(loaded, [{}]), go_on(training.step, [{}]))
    is_same(loaded.state_dict(), training.state())


def squared(model: Any, optimizer: Any, x: Tensor) -> Any:
    noise = torch.randn_like(x) + torch.rand(3)
    loss = update(model, optimizer, model(x + noise).square().mean())
    return loss, optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False, amsgrad=True),
        lambda p: torch.optim.NAdam(p),
        lambda p: torch.optim.Adafactor(p),
        lambda p: torch.optim.AdamW(
            [{"params": [q], "lr": 0.1 / (i + 1)} for i, q in enumerate(p)]
        ),
    ],
)
def test_optimizers_and_noise_go_on(make: Any, tmp_path: Path):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters())
    step = compile_step(
        lambda x: squared(model, optimizer, x),
        model=model, optimizer=optimizer, backend="aot_eager", accumulate=2, python="replay",
    )  # fmt: skip
    for size in (2, 4):  # the file has the last kind of batch
        step(torch.ones(size, 3))
    step.save(tmp_path / "step.dbp")
    loaded = load_step(tmp_path / "step.dbp")
    results = []
    for taken, groups in ((loaded, loaded.param_groups), (step, optimizer.param_groups)):
        torch.manual_seed(4)
        groups[-1]["lr"] = groups[-1]["lr"] * 0.5
        results.append([copy.deepcopy(taken(torch.ones(4, 3))) for _ in range(3)])
    is_same(*results)
    is_same(
        loaded.state_dict(),
        {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()},
    )
    with pytest.raises(PackageError, match=r"float32\[2, 3\]"):
        loaded(torch.ones(2, 3))


def test_several_models_and_threads(tmp_path: Path):
    models = [nn.Linear(3, 3), nn.Linear(3, 3)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in models]

    def function(x: Tensor) -> Tensor:
        losses = [m(x).square().mean() for m in models]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            update(None, optimizer, loss)
        return torch.stack(losses)

    step = compile_step(
        function, model=models, optimizer=optimizers, backend="aot_eager", python="replay"
    )
    x = torch.ones(2, 3)
    step(x)
    step.save(tmp_path / "step.dbp")
    loaded = load_step(tmp_path / "step.dbp")
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(loaded, [x] * 8))
    expected = [step(x) for _ in range(8)]
    by_size = [sorted(map(torch.Tensor.tolist, each)) for each in (found, expected)]
    assert by_size[0] == by_size[1]
    state = loaded.state_dict()
    is_same(state["model"], [dict(m.state_dict()) for m in models])
    is_same(state["optimizer"], [o.state_dict() for o in optimizers])
    loaded.load_state_dict({"optimizer": state["optimizer"]})
    assert [group["momentum"] for group in loaded.param_groups] == [0.9, 0.9]


def test_closures_numbers_and_names_are_kept(tmp_path: Path):
    weights = torch.tensor([1.0, 3.0])

    def function(model: Any, optimizer: Any, y: Tensor, batch: Any, factor: float) -> Any:
        loss = (model(batch["x"]) * weights).sum() * factor + y.sum()
        return update(model, optimizer, loss), factor, "done", model.bias, batch["x"]

    step = simple(function)
    given = torch.zeros(2), {"x": torch.ones(2, 3), "not read": torch.ones(3)}, 0.5
    step(*given)
    with pytest.raises(
        SaveError, match=r"at .*weights.*not an argument and may be a different tensor"
    ):
        step.save(tmp_path / "step.dbp")
    step(*given)
    step.save(tmp_path / "step.dbp")
    loaded = load_step(tmp_path / "step.dbp")
    assert step.eager_steps == 1
    for _ in range(2):
        ours, theirs = loaded(*given), step(*given)
        assert ours[1:3] == theirs[1:3] == (0.5, "done")
        is_same([ours[0], *ours[3:]], [theirs[0], theirs[3].detach(), theirs[4]])
    assert "float32[2], {'x': float32[2, 3], 'not read': float32[3]}, 0.5" in repr(loaded)
    assert f"2 tensors of 32 B, saved with torch {torch.__version__})" in repr(loaded)
    text = (
        r"arguments\[0\]\[2\] is 0.25, but .* saved for 0.5\. .*gets a tensor there, .*\. The step"
    )
    with pytest.raises(PackageError, match=text):
        loaded(*given[:2], 0.25)
    assert loaded.explain().graphs[0].reports == loaded.reports
    assert isinstance(loaded, LoadedStep)


def test_numbers_that_change_are_tensors(tmp_path: Path):
    step = simple(lambda m, o, x, factor, i: update(m, o, m(x).sin().sum() * factor / (i + 1)))
    x = torch.rand(2, 3)
    for _ in range(2):
        step(x, torch.tensor(0.5), torch.tensor(2))
    step.save(tmp_path / "step.dbp")
    loaded = load_step(tmp_path / "step.dbp")
    for factor, i in ((0.7, 3), (-2.0, 0), (0.5, 2)):
        given = x, torch.tensor(factor), torch.tensor(i)
        torch.testing.assert_close(loaded(*given), step(*given), rtol=0, atol=0)
    assert step.eager_steps == 1
    changing = simple(lambda m, o, x, factor: update(m, o, m(x).sum() * factor))
    for factor in (0.5, 0.7, 0.9):
        changing(x, factor)
    with pytest.raises(SaveError, match=r"Python scalar that changes, at .*Pass it as a tensor"):
        changing.save(tmp_path / "step.dbp")


def test_a_step_that_was_only_recorded_is_compiled_for_its_file(tmp_path: Path):
    step = simple(lambda m, o, x, y: (update(m, o, (m(x) * y).sum()), y), "openxla")
    given = torch.rand(2, 3), torch.rand(2, 2)
    step(*given)
    step.save(tmp_path / "step.dbp")
    loaded = load_step(tmp_path / "step.dbp", strict=True)
    for _ in range(3):
        torch.testing.assert_close(loaded(*given), step(*given))
    assert (step.compilations, step.eager_steps) == (1, 1)


def test_a_loaded_step_refuses_labels_out_of_range(tmp_path: Path):
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def function(x: Tensor, y: Tensor) -> Tensor:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    x, y = torch.randn(2, 4), torch.tensor([0, 2])
    step = compile_step(
        function, model=model, optimizer=optimizer, backend="openxla", python="replay"
    )
    step(x, y)
    step.save(tmp_path / "step.pt")
    loaded = load_step(tmp_path / "step.pt")
    before = loaded.state_dict()["model"]["weight"]
    with pytest.raises(IndexError, match="out of range"):
        loaded(x, torch.tensor([0, 3]))
    assert torch.equal(loaded.state_dict()["model"]["weight"], before)
    torch.testing.assert_close(loaded(x, y), step(x, y))
