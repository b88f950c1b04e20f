"""Where models of `bench` come from, and what is said if they cannot."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from dynamo_backends.bench import runs
from dynamo_backends.bench.cells import BenchConfig
from dynamo_backends.bench.sources import cases, find
from dynamo_backends.bench.suites.case import call
from dynamo_backends.bench.suites.huggingface import MODELS as HUGGINGFACE
from dynamo_backends.bench.suites.timm import MODELS as TIMM
from dynamo_backends.cli import main
from dynamo_backends.interface.errors import ModelError
from tests.bench import planted
from tests.bench.missing import hide_package


def test_the_lists_are_as_long_as_pytorchs():
    assert len(HUGGINGFACE) == len(cases(BenchConfig("huggingface"))) == 28
    assert len(TIMM) == 54
    assert "resnet18" in {case.name for case in cases(BenchConfig("classic"))}


@pytest.mark.parametrize("name", ["T5Small", "DistillGPT2", "GoogleFnet"])
def test_models_of_the_list_are_built_from_configurations(name: str):
    case = find(BenchConfig("huggingface", scale="test"), name, batch=3)
    inputs = case.inputs()
    with torch.no_grad():
        outputs = call(case.make(), inputs)
    assert outputs["logits"].shape == (3, 32, 512)
    assert outputs["loss"].isfinite()
    assert torch.equal(inputs["input_ids"], case.inputs()["input_ids"])


def test_small_bigbird_has_sparse_attention():
    case = find(BenchConfig("huggingface", scale="test"), "BigBird")
    model = case.make()
    with torch.no_grad():
        call(model, case.inputs())
    assert model.bert.attention_type == "block_sparse", "it takes the whole one for short sequences"


def test_sizes_are_the_lists():
    inputs = find(BenchConfig("huggingface"), "ElectraForCausalLM").inputs()
    assert inputs["input_ids"].shape == inputs["labels"].shape == (8, 512)
    assert find(BenchConfig("huggingface"), "ElectraForCausalLM", 2).inputs()["labels"].shape == (
        2,
        512,
    )


def test_timm_says_how_it_is_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="run: pip install --no-deps timm"):
        cases(BenchConfig("timm"))


def test_a_checkout_of_torchbench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "torchbenchmark" / "models" / "toy"
    folder.mkdir(parents=True)
    for parent in (folder.parent.parent, folder.parent):
        (parent / "__init__.py").write_text("")
    (folder / "__init__.py").write_text(
        "import torch\n"
        "class Model:\n"
        "    def __init__(self, test, device, batch_size):\n"
        "        assert (test, device) == ('eval', 'cpu')\n"
        "        self.x = torch.ones(batch_size or 7, 3)\n"
        "    def get_module(self):\n"
        "        return torch.nn.Linear(3, 2), [self.x]\n"
    )
    how = BenchConfig("torchbench", path=str(tmp_path))
    try:
        assert [case.name for case in cases(how)] == ["toy"]
        for batch, rows in ((None, 7), (5, 5)):
            case = find(how, "toy", batch)
            assert call(case.make(), case.inputs()).shape == (rows, 2)
    finally:
        for name in [n for n in sys.modules if n.startswith("torchbenchmark")]:
            del sys.modules[name]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (BenchConfig("clasic"), "there is no suite 'clasic'. Did you mean 'classic'?"),
        (
            BenchConfig("torchbench"),
            "--path is missing. Run `git clone https://github.com/pytorch/bench",
        ),
        (BenchConfig("torchbench", path="/no"), "'/no' is not a TorchBench checkout"),
        (BenchConfig("/no.py:models"), "there is no file '/no.py'"),
        (
            BenchConfig(f"{planted.__file__}:modells"),
            "has no function 'modells'. Did you mean 'models'?",
        ),
        (BenchConfig(f"{planted.__file__}:dense"), "must be a dict from names to functions"),
    ],
)
def test_what_cannot_be_found_is_said(how: BenchConfig, message: str):
    with pytest.raises(ModelError) as caught:
        cases(how)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["classic", "--models", "resnet19"], "unknown model 'resnet19'. Did you mean 'resnet18'?"),
        (["classic", "--backends", "inducter"], "no backend 'inducter'. Did you mean 'inductor'?"),
        (["classic", "--backends", "tensorrt"], "tensorrt: "),
        (["classic", "--backends", "/no.py:mine"], "there is no file '/no.py' with a function"),
        (["classic", "resnet18"], "'resnet18' is not an argument of a suite. Pass --models"),
    ],
)
def test_nothing_is_measured_if_something_is_unknown(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "run.json"
    assert main(["bench", *arguments, "--output", str(file)]) == 2
    assert message in capsys.readouterr().err
    assert not file.exists()


@pytest.mark.parametrize("package", ["psutil", "scipy", "jinja2"])
def test_a_missing_package_is_said_before_anything_is_measured(
    package: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    hide_package(package, monkeypatch)
    monkeypatch.setattr(runs, "measure_all", lambda *_: pytest.fail("something is measured"))
    file = tmp_path / "run.json"
    assert main(["bench", "classic", "--output", str(file)]) == 2
    assert f"needs {package}" in capsys.readouterr().err.replace("need ", "needs ")
    assert not file.exists()
