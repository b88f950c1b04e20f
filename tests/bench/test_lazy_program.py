"""benchmarks/lazy.py, which runs with another torch as well, and its networks."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from networks import networks
from tests.bench.programs import ROOT, load

lazy = load("benchmarks/lazy.py")


@pytest.mark.parametrize("name", ["lazy", "networks"])
def test_it_imports_torch_alone(name: str) -> None:
    """torch_xla's environment has neither this package nor what the harness needs."""
    named = set()
    for node in ast.parse((ROOT / f"benchmarks/{name}.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            named |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            named.add(str(node.module).split(".")[0])
    assert "torch" in named
    assert not named & {"dynamo_backends", "harness", "tests", "rich", "numpy", "jax"}


@pytest.mark.parametrize("name", networks("test"))
def test_networks_are_the_same_every_time(name: str) -> None:
    network = networks("test")[name]
    first, second = (network.make()(network.inputs(2)[1]) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(*network.inputs(2))
    assert first.isfinite().all()


def test_as_published_they_have_their_size() -> None:
    sizes = {
        name: sum(p.numel() for p in network.build().parameters())
        for name, network in networks("bench").items()
        if name != "mlp"
    }
    assert sizes["resnet18"] == 11_689_512  # torchvision's
    assert sizes["bert"] == pytest.approx(44.2e6, rel=0.01)


def way(result: float, calls: int = 1) -> Any:
    return lazy.Way(lambda: [torch.tensor(float(result + k)) for k in range(calls)], calls)


def test_wrong_results_are_named() -> None:
    expected = [torch.tensor(1.0), torch.tensor(2.0)]
    ways = {"right": way(1), "both": way(1, 2), "wrong": way(1.1)}
    ways["few"] = lazy.Way(lambda: [torch.tensor(1.0)], 2)
    assert lazy.wrong_ways(ways, expected) == ["wrong", "few"]


def test_a_sample_is_a_call() -> None:
    made = []

    def ten() -> list[torch.Tensor]:
        made.append(1)
        return []

    times = lazy.measure({"eager": way(1), "ten": lazy.Way(ten, 10)}, rounds=3)
    assert set(times) == {"eager", "ten"}
    assert len(made) == 5
    assert all(ms > 0 for ms in times.values())


def test_the_table_says_how_many_times_as_fast_as_eager() -> None:
    text = lazy.markdown({"mlp": {"eager": 2.0, "lazy": 4.0, "ltc": 1.0}})
    assert text.splitlines() == [
        "| model | eager, ms | lazy, ms | ltc, ms |",
        "| --- | --- | --- | --- |",
        "| mlp | 2.00 | 4.00 (0.50) | 1.00 (2.00) |",
    ]


def test_a_command_is_published_without_the_place_of_its_results() -> None:
    typed = ["--models", "mlp", "--json", "/home/me/a file.json", "--rounds", "3"]
    assert lazy.typed(typed) == "python benchmarks/lazy.py --models mlp --rounds 3"
    assert lazy.typed([]) == "python benchmarks/lazy.py"


def test_unknown_networks_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert lazy.main(["--models", "resnet8"]) == 2
    assert "there are: mlp, resnet18, bert" in capsys.readouterr().err


def test_without_torch_xla_it_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert lazy.main(["--torch-xla", "--models", "mlp", "--scale", "test"]) == 2
    assert "`make lazy-xla` makes an environment" in capsys.readouterr().err


class Pretended:
    """torch_xla as the program uses it, with tensors of the CPU."""

    __version__ = "2.9.0"

    def __init__(self) -> None:
        self.core = self.xla_model = self
        self.synced = self.waited = 0

    def device(self) -> str:
        return "cpu"

    def sync(self) -> None:
        self.synced += 1

    def wait_device_ops(self) -> None:
        self.waited += 1


def test_ten_calls_are_traced_and_waited_for_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretended = Pretended()
    monkeypatch.setattr(lazy, "started", lambda: pretended)
    ways: Any = lazy.ways_of_torch_xla(networks("test")["mlp"], pretended)
    with torch.no_grad():
        assert len(ways["lazy, 10 calls"].run()) == ways["lazy, 10 calls"].calls == 10
    assert (pretended.synced, pretended.waited) == (10, 1)
    file = tmp_path / "lazy.json"
    flags = ["--torch-xla", "--models", "mlp", "--scale", "test", "--rounds", "1"]
    assert lazy.main([*flags, "--json", str(file)]) == 0
    assert "| mlp |" in capsys.readouterr().out
    content = json.loads(file.read_text())
    assert set(content["results"]["mlp"]) == {
        "eager", "lazy", "lazy, 10 calls", "torch_xla openxla"
    }  # fmt: skip
    assert content["command"] == f"python benchmarks/lazy.py {' '.join(flags)}"
    assert content["environment"]["versions"]["torch_xla"] == "2.9.0"
    (table,) = lazy.published(content)
    assert table.splitlines()[-1].startswith("| mlp | ")


def test_lazy_tensor_core_has_the_same_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lazy.json"
    flags = ["--models", "mlp", "--scale", "test", "--rounds", "1", "--json", str(file)]
    assert lazy.main(flags) == 0
    header = capsys.readouterr().out
    for column in ("eager", "lazy", "lazy, 10 calls", "ltc_trace", "ltc", "openxla"):
        assert f"| {column}, ms |" in header
    (table,) = lazy.published(json.loads(file.read_text()))
    assert table.splitlines()[-1].startswith("| mlp | ")
    assert table in header
