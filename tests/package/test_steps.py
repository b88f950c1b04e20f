"""Training steps in files: they go on as the step that was saved would have gone on."""

import copy
import json
import os
import re
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends import (
    FallbackRefusedError,
    LoadedStep,
    PackageError,
    SaveError,
    Step,
    compile_step,
    load_step,
)
from dynamo_backends.cli.main import main
from dynamo_backends.interface.backend import Availability
from dynamo_backends.interface.registry import get_backend
from dynamo_backends.package import archive
from dynamo_backends.package.steps.inner import inner_of
from tests.bench.programs import ROOT


class Net(nn.Module):
    """Has batch norm with buffers, dropout, a tied weight and a buffer that is in no state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Linear(4 * 6 * 6, 8)
        self.third = nn.Linear(8, 8)
        self.fourth = nn.Linear(8, 8)
        self.fourth.weight = self.third.weight
        self.register_buffer("scale", torch.full((8,), 1.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(F.relu(self.norm(self.first(x))).flatten(1), 0.2)
        return self.fourth(F.relu(self.third(self.second(x)))) * self.scale


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, weight_decay=1e-3),
}


def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        yield (
            torch.randn(4, 3, 6, 6, generator=generator),
            torch.randint(0, 8, (4,), generator=generator),
        )


class Training:
    """A model, its optimizer and its step, after two steps."""

    def __init__(self, backend: str, optimizer: str = "adamw", steps: int = 2):
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.step = compile_step(
            self.function, model=self.model, optimizer=self.optimizer, backend=backend
        )
        for batch in batches(steps):
            self.step(*batch)

    def function(self, images: Tensor, labels: Tensor) -> Any:
        self.optimizer.zero_grad()
        scores = self.model(images)
        loss = F.cross_entropy(scores, labels)
        loss.backward()
        self.optimizer.step()
        return {"loss": loss, "right": (scores.argmax(1) == labels).sum()}

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def is_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.fixture(scope="module", params=["openxla", "aot_eager"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    training = Training(request.param)
    path = tmp_path_factory.mktemp("steps") / f"{request.param}.dbp"
    training.step.save(path)
    return training, path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of openxla that nothing else has changed."""
    made = tmp_path_factory.mktemp("step") / "openxla.dbp"
    Training("openxla").step.save(made)
    return made


def go_on(step: Callable[..., Any], groups: Any, count: int = 5) -> list[Any]:
    """More steps, the last with another learning rate."""
    torch.manual_seed(7)
    results = []
    for i, batch in enumerate(batches(count)):
        if i == 3:
            groups[0]["lr"] = 2e-3
        results.append(copy.deepcopy(step(*batch)))
    return results


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


def test_what_commands_say_of_a_step(path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["inspect", str(path)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"training step +Training\.function\n", said)
    assert re.search(r"called with +float32\[4, 3, 6, 6\], int64\[4\]\n", said)
    assert re.search(r"executables +1, ", said)
    assert main(["verify", str(path)]) == 0
    assert "the training step can be used on openxla, 1 executable" in capsys.readouterr().out


def test_training_goes_on_in_pytorch_and_comes_back(path: Path):
    loaded = load_step(path)
    model = Net()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    state = loaded.state_dict()
    before = copy.deepcopy(state)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = compile_step(
        lambda x, y: _loss(model, optimizer, x, y), model=model, optimizer=optimizer
    )
    for batch in batches(2):
        step(*batch)
    other = load_step(path)
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


CHILD = """
import json, sys
import torch, dynamo_backends
from dynamo_backends.interface.registry import get_backend
from safetensors.torch import load_file, save_file

def refuse(self, graph, options):
    raise AssertionError("something is compiled")
kind = type(get_backend("openxla"))
kind.compile = kind.compile_step = refuse
path = sys.argv[1]
step = dynamo_backends.load_step(path, strict=True)
given = load_file(path + ".batch")
torch.manual_seed(7)
losses = torch.stack([step(given["x"], given["y"])["loss"] for _ in range(3)])
save_file({**step.state_dict()["model"], "losses": losses}, path + ".results")
print(json.dumps({"steps": step.program.launches, "tests": "tests" in sys.modules}))
"""


def test_a_new_process_without_the_class(tmp_path: Path):
    from safetensors.torch import load_file, save_file

    training = Training("openxla")
    path = tmp_path / "step.dbp"
    training.step.save(path)
    (x, y), *_ = batches(1)
    save_file({"x": x, "y": y}, f"{path}.batch")
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, str(path)],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT),
             "OMP_NUM_THREADS": str(torch.get_num_threads()),
             "DYNAMO_BACKENDS_CACHE": str(tmp_path / "none")},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == {"steps": 3, "tests": False}
    torch.manual_seed(7)
    losses = torch.stack([training.step(x, y)["loss"] for _ in range(3)])
    there = load_file(f"{path}.results")
    is_same(there.pop("losses"), losses)
    shared = {k: v for k, v in training.model.state_dict().items() if k in there}
    is_same(there, shared)


def test_of_other_versions_it_is_compiled_again(path: Path, monkeypatch: pytest.MonkeyPatch):
    expected = go_on(load_step(path), [{}])
    backend = get_backend("openxla")
    versions = {**backend.versions(), "jaxlib": "0.99.0"}
    monkeypatch.setattr(type(backend), "versions", lambda self: versions)
    with pytest.warns(UserWarning, match=r"compiled from its portable form: jaxlib .* 0\.99\.0"):
        loaded = load_step(path)
    assert loaded.reports[0].cache_hits == 0
    torch.testing.assert_close(go_on(loaded, [{}]), expected, rtol=1e-4, atol=1e-4)
    assert not loaded.reports[0].events
    with pytest.raises(PackageError, match="strict=True refuses"):
        load_step(path, strict=True)


def test_without_the_backend_it_runs_call_by_call(path: Path, monkeypatch: pytest.MonkeyPatch):
    expected = go_on(load_step(path), [{}])
    gone = Availability(False, "there is no jax")
    monkeypatch.setattr(type(get_backend("openxla")), "availability", lambda self: gone)
    with pytest.warns(UserWarning, match="runs call by call: openxla cannot run here"):
        loaded = load_step(path)
    assert loaded.backend == "aot_eager"
    torch.testing.assert_close(go_on(loaded, [{}]), expected, rtol=1e-4, atol=1e-4)


def test_fallback_may_be_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    step = simple(plain, "openxla", options={"fallback": "error"})
    step(torch.rand(2, 3))
    step.save(tmp_path / "step.dbp")
    gone = Availability(False, "there is no jax")
    monkeypatch.setattr(type(get_backend("openxla")), "availability", lambda self: gone)
    with pytest.raises(FallbackRefusedError, match="openxla cannot run here"):
        load_step(tmp_path / "step.dbp")


def test_backends_without_executables_of_steps(tmp_path: Path):
    step = simple(lambda m, o, x: update(m, o, m(x).square().mean()), "onnxrt")
    x = torch.rand(2, 3)
    step(x)
    with pytest.warns(UserWarning, match="the file has no executable"):
        step.save(tmp_path / "step.dbp")
    with pytest.warns(UserWarning, match="it has no executable of onnxrt"):
        loaded = load_step(tmp_path / "step.dbp")
    torch.testing.assert_close([loaded(x) for _ in range(3)], [step(x) for _ in range(3)])
    assert loaded.reports[0].verified == 1
    for name in ("inductor", "autotune"):
        with pytest.raises(SaveError, match="more than one program"):
            inner_of(name)


def test_a_flipped_byte_is_noticed(path: Path, tmp_path: Path):
    with zipfile.ZipFile(path) as file:
        places = {info.filename: info.header_offset for info in file.infolist()}
    for name in ("manifest.json", "graph.json", "weights.safetensors", "executables/0/0.bin"):
        content = bytearray(path.read_bytes())
        content[places[name] + 30 + len(name) + 200] ^= 1
        damaged = tmp_path / "damaged.dbp"
        damaged.write_bytes(content)
        with pytest.raises(PackageError, match="damaged"):
            load_step(damaged)


def changed(path: Path, made: Path, change: Callable[[Any, Any], None]) -> Path:
    """A file with other contents, and with checksums that fit."""
    with archive.Archive(path) as opened:
        manifest, parts = opened.manifest, {n: opened.read(n) for n in opened.sizes}
    graph = json.loads(parts["graph.json"])
    change(manifest, graph)
    archive.write(made, manifest, {**parts, "graph.json": json.dumps(graph).encode()})
    return made


def test_what_no_file_has_is_refused(path: Path, tmp_path: Path):
    aot = tmp_path / "aot.dbp"
    Training("aot_eager").step.save(aot)

    def calls_python(_: Any, graph: Any) -> None:
        graph["calls"][0]["target"] = "torch.ops.os.system.default"

    def lacks_an_input(manifest: Any, _: Any) -> None:
        manifest["step"]["slots"].pop()

    def draws_otherwise(manifest: Any, _: Any) -> None:
        manifest["step"]["draws"][0]["args"][0] = {"value": "set_"}

    for change, text in (
        (calls_python, "system"), (lacks_an_input, "differ"), (draws_otherwise, "draws by 'set_'"),
    ):  # fmt: skip
        with pytest.raises(PackageError, match=text):
            load_step(changed(aot, tmp_path / "changed.dbp", change))


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
    with pytest.raises(SaveError, match="the next step would be another one: a setting"):
        training.step.save(tmp_path / "step.dbp")
    training.step(*next(batches(1)))
    training.step.save(tmp_path / "step.dbp")
    loaded = load_step(tmp_path / "step.dbp")  # was captured where there were gradients
    assert loaded.param_groups[0]["nesterov"]
    is_same(go_on(loaded, [{}]), go_on(training.step, [{}]))
    is_same(loaded.state_dict(), training.state())


def test_models_and_steps_are_not_taken_for_each_other(path: Path, tmp_path: Path):
    with pytest.raises(PackageError, match=r"use dynamo_backends\.load_step"):
        dynamo_backends.load(path)
    model = tmp_path / "model.dbp"
    dynamo_backends.save(model, nn.Linear(2, 2), (torch.rand(1, 2),), backend="eager")
    with pytest.raises(PackageError, match=r"load it by dynamo_backends\.load"):
        load_step(model)


def test_numbers_are_those_that_the_step_was_captured_for(tmp_path: Path):
    training = Training("aot_eager", "sgd")
    training.step.save(tmp_path / "step.dbp")
    loaded = load_step(tmp_path / "step.dbp")
    (group,) = loaded.param_groups
    assert dict(group)["momentum"] == 0.9
    before = loaded.state_dict()
    group["weight_decay"] = 0
    with pytest.raises(PackageError, match=r"\['weight_decay'\] = 0 the function computes"):
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
    with pytest.raises(PackageError, match="keeps its entries"):
        del group["lr"]


def test_other_arguments_and_states_are_refused(path: Path):
    loaded = load_step(path)
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


def simple(function: Callable[..., Any], backend: str = "aot_eager", **more: Any) -> Step:
    """The step of a linear layer; `function` is given the layer and its optimizer first."""
    torch.manual_seed(0)
    model = more.pop("model", None) or nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return compile_step(
        lambda *args: function(model, optimizer, *args),
        model=model, optimizer=optimizer, backend=backend, **more,
    )  # fmt: skip


def update(model: Any, optimizer: Any, loss: Tensor) -> Tensor:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def plain(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    return update(model, optimizer, model(x).sum())


def prints(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    print("a step")
    return update(model, optimizer, model(x).sum())


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


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (scales, "uses a GradScaler"),
        (averages, "writes to .*AVERAGE"),
        (counts, "does something in Python"),
        (prints, "does something in Python"),
        (accumulates, "adds to the gradient of model.weight"),
        (draws_by_data, "depend on what the step computes"),
    ],
)
def test_what_a_file_cannot_hold_is_refused(
    function: Callable[..., Any], text: str, tmp_path: Path
):
    step = simple(function)
    with pytest.raises(SaveError, match="take one"):
        step.save(tmp_path / "step.dbp")
    step(torch.rand(2, 3))
    with pytest.raises(SaveError, match=text):
        step.save(tmp_path / "step.dbp")
    assert list(tmp_path.iterdir()) == []


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
        model=model, optimizer=optimizer, backend="aot_eager", accumulate=2,
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

    step = compile_step(function, model=models, optimizer=optimizers, backend="aot_eager")
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


def test_shared_memory_and_missing_folders_are_refused(tmp_path: Path):
    shared = nn.Linear(3, 2)
    shared.bias = nn.Parameter(torch.zeros(2))
    shared.register_buffer("same", shared.weight.data.view(-1))
    step = simple(plain, model=shared)
    step(torch.rand(2, 3))
    with pytest.raises(SaveError, match="share memory"):
        step.save(tmp_path / "step.dbp")
    step = simple(plain)
    step(torch.rand(2, 3))
    with pytest.raises(SaveError, match="there is no folder"):
        step.save(tmp_path / "nowhere" / "step.dbp")


def test_closures_numbers_and_names_are_kept(tmp_path: Path):
    weights = torch.tensor([1.0, 3.0])

    def function(model: Any, optimizer: Any, batch: Any, factor: float) -> Any:
        loss = update(model, optimizer, (model(batch["x"]) * weights).sum() * factor)
        return loss, factor, "done", model.bias

    step = simple(function)
    step({"x": torch.ones(2, 3)}, 0.5)
    step.save(tmp_path / "step.dbp")
    loaded = load_step(tmp_path / "step.dbp")
    ours = loaded({"x": torch.ones(2, 3)}, 0.25)
    theirs = step({"x": torch.ones(2, 3)}, 0.25)
    assert ours[1:3] == theirs[1:3] == (0.25, "done")
    is_same([ours[0], ours[3]], [theirs[0], theirs[3].detach()])
    assert "{'x': float32[2, 3]}, float" in repr(loaded)
    assert loaded.explain().graphs[0].reports == loaded.reports
    assert isinstance(loaded, LoadedStep)
