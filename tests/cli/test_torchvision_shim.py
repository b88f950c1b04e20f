"""In processes of their own: importing torchvision registers operators for good."""

import pytest

from dynamo_backends.bench import torchvision_shim as shim
from harness import run_child

HEAD = """
import torch
from harness.processes import hand_back
from dynamo_backends.bench import torchvision_shim as shim
"""


@pytest.mark.long
def test_torchvision_and_transformers_import() -> None:
    code = HEAD + (
        "models = shim.import_torchvision().models\n"
        "again = shim.import_torchvision().models\n"
        "bert = shim.import_transformers().BertModel\n"
        "hand_back(same=models is again, name=bert.__name__, net=callable(models.resnet18))"
    )
    assert run_child(["-c", code]) == {"same": True, "name": "BertModel", "net": True}


def test_every_schema_is_valid_and_declared_once() -> None:
    code = HEAD + (
        "first, second = shim.declare_operators(), shim.declare_operators()\n"
        "names = [n for n in shim.SCHEMAS if hasattr(torch.ops.torchvision, n)]\n"
        "hand_back(first=first, second=second, names=names)"
    )
    assert run_child(["-c", code]) == {
        "first": list(shim.SCHEMAS),
        "second": [],
        "names": list(shim.SCHEMAS),
    }


@pytest.mark.parametrize(
    ("package", "load", "remedy"),
    [
        ("torchvision", "import_torchvision", "pip install --no-deps torchvision pillow"),
        ("transformers", "import_transformers", "pip install transformers"),
    ],
)
def test_missing_package_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, package: str, load: str, remedy: str
) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(shim.importlib, "import_module", absent)
    monkeypatch.setattr(shim.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=remedy):
        getattr(shim, load)()
