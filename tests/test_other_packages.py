"""Packages that register names of ours with torch, imported before and after ours are used."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.programs import ROOT

DOUBLES = ROOT / "tests" / "doubles"
START = """
import importlib, logging, sys, torch
from torch._dynamo.backends.registry import lookup_backend
said = []
class Handler(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger("dynamo_backends").addHandler(Handler())

def add(x):
    return x.sin() + 1

x = torch.ones(3)
"""


def run(body: str, *arguments: str, **environment: str) -> None:
    """Runs code in a process that finds the doubles by the packages' names."""
    done = subprocess.run(
        [sys.executable, "-c", START + body, *arguments],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{DOUBLES}", **environment},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


USED = """
import torch_tensorrt, torch_xla
import intel_extension_for_pytorch as extension
theirs = lookup_backend("tensorrt")
said.clear()
for _ in range(2):
    torch._dynamo.reset()
    assert torch.equal(torch.compile(add, backend="tensorrt")(x), add(x))
assert len(torch_tensorrt.used) == 2
(line,) = said
assert "is torch_tensorrt's backend" in line and "dynamo_backends.compiler('tensorrt')" in line
assert lookup_backend("torch_tensorrt") is torch_tensorrt.torch_tensorrt_backend
import dynamo_backends
assert dynamo_backends.compiler("tensorrt").name == "tensorrt"
assert lookup_backend("ipex") is extension.ipex
for name in ("ipex", "openxla"):
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(add, backend=name)(x), add(x))
"""
OURS = """
ours = {name: lookup_backend(name) for name in ("tensorrt", "ipex", "openxla")}
for name, backend in ours.items():
    assert type(backend).__module__.startswith("dynamo_backends."), backend
    assert lookup_backend(name) is backend
"""
BROKEN = """
sys.path.insert(0, sys.argv[1])  # a package that cannot be imported takes no name
try:
    import torch_tensorrt
except OSError:
    del sys.path[0]
    importlib.invalidate_caches()
assert lookup_backend("tensorrt") is ours["tensorrt"]
"""


def test_ours_give_way_to_packages_that_are_imported_later(tmp_path: Path):
    (tmp_path / "torch_tensorrt.py").write_text("raise OSError('no libnvinfer')")
    run(OURS + BROKEN + USED + "assert theirs is not ours['tensorrt']\n", str(tmp_path))


@pytest.mark.parametrize("autoload", ["1", pytest.param("0", marks=pytest.mark.long)])
def test_names_belong_to_packages_that_are_imported_before(autoload: str):
    imports = "import torch_tensorrt, torch_xla, intel_extension_for_pytorch, dynamo_backends\n"
    run(imports + USED, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload)
