"""A small model, and packages of it that the tests of this folder share."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends.package import archive
from tests.package.trained_steps import Training

LENGTHS = (2, 3, 5, 17, 30)


class Small(nn.Module):
    """Has tied weights, a buffer, a constant, a nested result and an optional argument."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.norm = nn.LayerNorm(8)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))

    def forward(self, x: Tensor, mask: Tensor | None = None, factor: float = 2.0) -> Any:
        y = self.norm(self.second(torch.relu(self.first(x)))) * self.scale
        if mask is not None:
            y = y.masked_fill(mask.unsqueeze(-1), 0.0)
        return {"states": y * factor, "pooled": (y.sum(1), None)}


@pytest.fixture(scope="session")
def model() -> Small:
    torch.manual_seed(0)
    return Small().eval()


@pytest.fixture(scope="session")
def call() -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    return (torch.rand(2, 4, 8, generator=generator),), {"mask": torch.arange(4).repeat(2, 1) > 2}


@pytest.fixture(scope="session")
def packages(model: Small, call: Any, tmp_path_factory: pytest.TempPathFactory):
    """Saves a package of the model with a backend; those of a session are saved once."""
    folder, made = tmp_path_factory.mktemp("packages"), dict[tuple[str, bool], Path]()

    def package(backend: str, dynamic: bool = False) -> Path:
        if (backend, dynamic) not in made:
            path = folder / f"{backend}{dynamic}.dbp"
            length = torch.export.Dim("length", min=2, max=32)
            shapes = {"x": {1: length}, "mask": {1: length}} if dynamic else None
            dynamo_backends.save(model, path, *call, dynamic_shapes=shapes, backend=backend)
            made[backend, dynamic] = path
        return made[backend, dynamic]

    return package


@pytest.fixture(scope="session")
def step_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of openxla that nothing else has changed."""
    made = tmp_path_factory.mktemp("step") / "openxla.dbp"
    Training("openxla").step.save(made)
    return made


@pytest.fixture
def rewritten(tmp_path: Path) -> Callable[..., Path]:
    """Writes a package anew with other contents, and with checksums that fit."""

    def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
        """`change` is given the manifest and the graph."""
        with archive.Archive(path) as opened:
            manifest, parts = opened.manifest, {n: opened.read(n) for n in opened.sizes}
        graph = json.loads(parts["graph.json"])
        change(manifest, graph)
        parts["graph.json"] = json.dumps(graph).encode()
        made = tmp_path / "rewritten.dbp"
        archive.write(made, manifest, parts)
        return made

    return rewrite


def entries(path: Path) -> dict[str, bytes]:
    """What a zip has."""
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist()}
