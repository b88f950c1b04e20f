"""`~` is the user's home in the paths of packages and reports."""

from pathlib import Path

import pytest
import torch
from torch import nn

import dynamo_backends
from dynamo_backends.runtime.cache import cache_folder


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    model, x = nn.Linear(4, 2).eval(), torch.ones(3, 4)
    with torch.no_grad():
        dynamo_backends.save(model, "~/model.dbp", (x,), backend="openxla")
        loaded = dynamo_backends.load("~/model.dbp")
        torch.testing.assert_close(loaded(x), model(x))
        dynamo_backends.explain(model, x, backend="eager").save("~/explained.json")
    assert {p.name for p in tmp_path.iterdir()} >= {"model.dbp", "explained.json"}
    monkeypatch.setenv("DYNAMO_BACKENDS_CACHE", "~/cache")
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.setenv("DYNAMO_BACKENDS_CACHE", "~nobody-of-that-name/cache")
    assert cache_folder() == Path("~nobody-of-that-name/cache")
