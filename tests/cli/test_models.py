"""Models that the command line names: every form, and what is said of a wrong one."""

import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from dynamo_backends.cli.models import load
from dynamo_backends.interface.errors import ModelError

FACTORIES = """
import torch
from torch import nn

def pair(batch):
    return nn.Linear(3, 2), torch.ones(batch, 3)

def triple():
    return torch.add, (torch.ones(2), torch.ones(2)), {"alpha": 2}

def module(batch=1):
    model = nn.Linear(3, 2)
    model.example_inputs = lambda: (torch.ones(batch, 3),)
    return model

def wrong():
    return nn.Linear(3, 2)
"""


@pytest.fixture
def factories(tmp_path: Path) -> Path:
    path = tmp_path / "factories.py"
    path.write_text(FACTORIES)
    return path


def run(name: str, batch: int = 2, small: bool = True) -> object:
    loaded = load(name, batch, small)
    if isinstance(loaded.model, nn.Module):
        loaded.model.eval()
    with torch.no_grad():
        return loaded.model(*loaded.args, **loaded.kwargs)


@pytest.mark.parametrize(
    ("factory", "shape"), [("pair", (5, 2)), ("module", (5, 2)), ("triple", (2,))]
)
def test_a_function_in_a_file(factories: Path, factory: str, shape: tuple[int, ...]):
    result = run(f"{factories}:{factory}", batch=5)
    assert isinstance(result, torch.Tensor)
    assert result.shape == shape


def test_a_configuration_of_transformers():
    loaded = load("hf:BertConfig", batch=3, small=True)
    assert isinstance(loaded.model, nn.Module)
    assert loaded.model.config.num_hidden_layers == 2
    assert loaded.kwargs["input_ids"].shape[0] == 3
    assert run("hf:BertConfig").last_hidden_state.shape[:2] == (2, 32)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "GPT2LMHeadModel"])
def test_a_model_class_of_transformers(name: str):
    assert run(f"hf:{name}").logits.shape[:2] == (2, 32)  # type: ignore[attr-defined]


def test_a_model_of_torchvision():
    result = run("torchvision:squeezenet1_1", batch=1)
    assert isinstance(result, torch.Tensor)
    assert result.shape == (1, 1000)


def test_a_model_of_timm(monkeypatch: pytest.MonkeyPatch):
    model = nn.Flatten()
    model.default_cfg = {"input_size": (3, 4, 5)}  # type: ignore[assignment]
    timm = types.ModuleType("timm")
    timm.list_models = lambda: ["flat"]  # type: ignore[attr-defined]
    timm.create_model = lambda name, pretrained: model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", timm)
    result = run("timm:flat")
    assert isinstance(result, torch.Tensor)
    assert result.shape == (2, 60)
    with pytest.raises(ModelError, match=r"timm has no model 'flut'\. Did you mean 'flat'\?"):
        load("timm:flut", 2)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("resnet18", r"MODEL must be hf:NAME, torchvision:NAME, .* not 'resnet18'"),
        ("torchvison:resnet18", r"Did you mean torchvision:resnet18\?"),
        ("torchvision:", "MODEL must be hf:NAME"),
        ("torchvision:resnet19", r"torchvision has no model 'resnet19'\. Did you mean 'resnet1"),
        (
            "hf:BertConfg",
            r"no configuration or model class 'BertConfg'\. Did you mean 'BertConfig'",
        ),
        ("hf:AutoModel", r"no configuration or model class 'AutoModel'"),
        ("no/such/file.py:f", r"there is no file 'no/such/file\.py'"),
    ],
)
def test_a_wrong_name(name: str, text: str):
    with pytest.raises(ModelError, match=text):
        load(name, 2)


def test_a_wrong_function_in_a_file(factories: Path):
    with pytest.raises(ModelError, match=r"has no function 'pear'\. Did you mean 'pair'\?"):
        load(f"{factories}:pear", 2)
    with pytest.raises(ModelError, match=r"must return \(model, args\).*, not Linear"):
        load(f"{factories}:wrong", 2)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("hf:BertConfig", r"pip install 'dynamo-backends\[bench\]'"),
        ("torchvision:resnet18", "pip install --no-deps torchvision pillow"),
        ("timm:resnet18", "pip install --no-deps timm"),
    ],
)
def test_a_missing_package(monkeypatch: pytest.MonkeyPatch, name: str, command: str):
    import importlib

    package = {"hf": "transformers"}.get(name.split(":")[0], name.split(":")[0])
    import_module = importlib.import_module

    def without(wanted: str, *args: object) -> object:
        if wanted == package:
            raise ModuleNotFoundError(f"No module named {wanted!r}", name=wanted)
        return import_module(wanted)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(ModelError, match=f"{name} needs {package}, which is not .*: {command}"):
        load(name, 2)
