"""What no file of a training step holds, what is no such file, and what a loaded step refuses."""

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends import PackageError, SaveError, load_step
from tests.package.trained_steps import Training, batches, is_same, plain, simple, update


def test_a_flipped_byte_is_noticed(step_path: Path, tmp_path: Path):
    with zipfile.ZipFile(step_path) as file:
        places = {info.filename: info.header_offset for info in file.infolist()}
    for name in ("manifest.json", "graph.json", "weights.safetensors", "executables/0/0.bin"):
        content = bytearray(step_path.read_bytes())
        content[places[name] + 30 + len(name) + 200] ^= 1
        damaged = tmp_path / "damaged.dbp"
        damaged.write_bytes(content)
        with pytest.raises(PackageError, match="damaged"):
            load_step(damaged)


def test_what_no_file_has_is_refused(rewritten: Callable[..., Path], tmp_path: Path):
    aot = tmp_path / "aot.dbp"
    Training("aot_eager").step.save(aot)

    def calls_python(_: Any, graph: Any) -> None:
        graph["graph_module"]["graph"]["nodes"][0]["target"] = "torch.ops.os.system.default"

    def lacks_an_input(manifest: Any, _: Any) -> None:
        manifest["step"]["slots"].pop()

    def draws_otherwise(manifest: Any, _: Any) -> None:
        (text,) = manifest["step"]["draws"]
        (method,) = {"bernoulli_", "uniform_"} & set(text.split('"'))
        manifest["step"]["draws"] = [text.replace(method, "set_")]

    for change, text in (
        (calls_python, "system"),
        (lacks_an_input, "inputs do not match"),
        (draws_otherwise, "draws random numbers with 'set_'"),
    ):
        with pytest.raises(PackageError, match=text):
            load_step(rewritten(aot, change))


def test_models_and_steps_are_not_taken_for_each_other(step_path: Path, tmp_path: Path):
    with pytest.raises(PackageError, match=r"Use dynamo_backends\.load_step"):
        dynamo_backends.load(step_path)
    model = tmp_path / "model.dbp"
    dynamo_backends.save(nn.Linear(2, 2), model, (torch.rand(1, 2),), backend="eager")
    with pytest.raises(PackageError, match=r"Use dynamo_backends\.load"):
        load_step(model)


def test_numbers_are_those_that_the_step_was_captured_for(tmp_path: Path):
    training = Training("aot_eager", "sgd")
    training.step.save(tmp_path / "step.dbp")
    loaded = load_step(tmp_path / "step.dbp")
    (group,) = loaded.param_groups
    assert dict(group)["momentum"] == 0.9
    before = loaded.state_dict()
    group["weight_decay"] = 0
    with pytest.raises(PackageError, match=r"\['weight_decay'\] = 0 the saved function takes"):
        loaded(*next(batches(1)))
    is_same(loaded.state_dict()["model"], before["model"])
    group["weight_decay"] = 0.1
    loaded(*next(batches(1)))
    for key, value, text in (
        ("nesterov", True, "saved for False"), ("lr", "fast", "has to be a number"),
        ("speed", 1, "has no 'speed'"),
    ):  # fmt: skip
        with pytest.raises(PackageError, match=text):
            group[key] = value
    with pytest.raises(PackageError, match="cannot be deleted"):
        del group["lr"]


def test_other_arguments_and_states_are_refused(step_path: Path):
    loaded = load_step(step_path)
    x, y = next(batches(1))
    before = loaded.state_dict()
    for args in ((x[:2], y), (x.double(), y), (x,), (x, 3)):
        with pytest.raises(PackageError, match=r"calls with \(float32\[4, 3, 6, 6\], int64\[4\]\)"):
            loaded(*args)
    with pytest.raises(PackageError, match="lacks"):
        loaded.load_state_dict({"model": {}})
    wrong = {**before["model"], "first.weight": torch.zeros(2)}
    with pytest.raises(PackageError, match=r"first\.weight"):
        loaded.load_state_dict({"model": wrong})
    with pytest.raises(PackageError, match="model and optimizer"):
        loaded.load_state_dict({"models": wrong})
    is_same(loaded.state_dict(), before)
    loaded(x.to(memory_format=torch.channels_last), y)  # any layout


def accumulates(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).sum()
    loss.backward()
    optimizer.step()
    return loss


def draws_by_data(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    return update(model, optimizer, (model(x) * torch.bernoulli(x.sigmoid())[:, :2]).sum())


def scales(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    scaler = SCALER
    loss: Tensor = model(x).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss


SCALER = torch.amp.GradScaler("cpu")
AVERAGE = torch.zeros(2)
COUNTS = [0.5]


def averages(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    loss = update(model, optimizer, model(x).sum())
    AVERAGE.mul_(0.9).add_(model.bias.detach())
    return loss


def counts(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    COUNTS[0] *= 0.5
    return update(model, optimizer, model(x).sum() * COUNTS[0])


def logs(model: Any, optimizer: Any, x: Tensor) -> float:
    return update(model, optimizer, model(x).sum()).item()


def keeps(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    KEPT["hidden"] = model(x).detach() + KEPT.get("hidden", 0)
    return update(model, optimizer, model(x).sum())


def makes(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    return update(model, optimizer, model(x * torch.tensor([1.0, 2.0, 3.0])).sum())


def loads(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    noise = torch.rand(3, generator=GENERATOR)
    return update(model, optimizer, model(x + noise).sum())


def reads(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    factor = 2 if x.tolist()[0][0] > 0 else 1
    return update(model, optimizer, model(x).sum() * factor)


def chooses(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    CHOSEN.append(CHOSEN[-2].clone())
    return update(model, optimizer, model(x + CHOSEN[-3]).sum())


def returns_a_set(model: Any, optimizer: Any, x: Tensor) -> Any:
    return {update(model, optimizer, model(x).sum())}


KEPT: dict[str, Any] = {}
CHOSEN = [torch.ones(3), torch.ones(3), torch.ones(3)]
GENERATOR = torch.Generator()


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (scales, "uses a GradScaler"),
        (averages, "writes to a tensor that does not belong to a model or optimizer"),
        (counts, r"a Python scalar that changes, at .*model\(x\).sum\(\) \* COUNTS"),
        (logs, r"needs the value of a tensor during the step, at .*\.item\(\)"),
        (keeps, r"a tensor computed at .*KEPT"),
        (makes, r"creates tensors from Python data at .*torch\.tensor"),
        (loads, r"creates tensors from Python data at .*torch\.rand"),
        (reads, r"Python reads the value of a tensor, at .*x\.tolist"),
        (chooses, r"is still referenced from Python|may be a different tensor at each call"),
        (returns_a_set, "it returns a set; return tensors"),
        (accumulates, "accumulates into the gradient of model.weight"),
        (draws_by_data, "depends on computed values"),
    ],
)
def test_what_a_file_cannot_hold_is_refused(
    function: Callable[..., Any], text: str, tmp_path: Path
):
    step = simple(function)
    with pytest.raises(SaveError, match="Call the step once"):
        step.save(tmp_path / "step.dbp")
    for _ in range(3):
        step(torch.rand(2, 3))
    with pytest.raises(SaveError, match=text):
        step.save(tmp_path / "step.dbp")
    assert list(tmp_path.iterdir()) == []


def test_shared_memory_and_missing_folders_are_refused(tmp_path: Path):
    shared = nn.Linear(3, 2)
    shared.bias = nn.Parameter(torch.zeros(2))
    shared.register_buffer("same", shared.weight.data.view(-1))
    step = simple(plain, model=shared)
    step(torch.rand(2, 3))
    with pytest.raises(SaveError, match="share storage"):
        step.save(tmp_path / "step.dbp")
    step = simple(plain)
    step(torch.rand(2, 3))
    with pytest.raises(SaveError, match="there is no folder"):
        step.save(tmp_path / "nowhere" / "step.dbp")
