"""Examples of the first pages, in a second process that finds all in the cache."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.backend_checks import usable
from tests.bench.programs import ROOT

PAGE = """
import re, sys
from tests.pages import differences, executed

page, backend = sys.argv[1:]
inference = re.compile(r\'((?:torch.compile|save)\\(.*backend=)"\\w+"\')

def change(text):
    return inference.sub(rf\'\\1"{backend}"\', text) if backend else text

with executed(page, change) as (ran, names):
    assert backend or [d for d in differences(ran) if d[0] is not None] == []
"""
PACKAGES = """
import sys, torch, dynamo_backends
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(14400, 10)).eval()
images = torch.rand(4, 3, 32, 32)
for backend in sys.argv[1:]:
    with torch.no_grad():
        dynamo_backends.save(model, "model.dbp", (images,), backend=backend)
        loaded = dynamo_backends.load("model.dbp")
        torch.testing.assert_close(loaded(images), model(images), rtol=1e-4, atol=1e-5)
        compiled = torch.compile(model, backend=backend)
        torch.testing.assert_close(compiled(images), model(images), rtol=1e-4, atol=1e-5)
"""
OTHERS = ["onnxrt", "openxla", "ov", "tvm", "iree", "inductor_freezing", "ts_trace", "autotune"]


def run_twice(program: str, folder: Path, *arguments: str) -> None:
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program, *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT), "DYNAMO_BACKENDS_CHECK": "0"},
            cwd=folder, capture_output=True, text=True, timeout=900,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    "backends",
    [
        ("onnxrt", "openxla", "ov"),
        pytest.param(("tvm", "iree"), marks=pytest.mark.long),
        pytest.param(("inductor_freezing", "ts_trace"), marks=pytest.mark.long),
    ],
    ids=lambda names: names[0],
)
def test_a_package_is_saved_twice(backends: tuple[str, ...], tmp_path: Path):
    run_twice(PACKAGES, tmp_path, *map(usable, backends))


@pytest.mark.long
@pytest.mark.parametrize(
    ("page", "backend"),
    [("docs/start.md", ""), ("README.md", ""), *(("README.md", name) for name in OTHERS)],
)
def test_the_examples_of_a_page_run_twice(page: str, backend: str, tmp_path: Path):
    for name in {"openxla", "onnxrt", backend or "onnxrt"}:
        usable(name)
    run_twice(PAGE, tmp_path, page, backend)
