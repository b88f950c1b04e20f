"""The examples that read files without torch."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dynamo_backends
from tests.bench.programs import ROOT
from tests.package.conftest import Small
from tests.package.test_package import expected

WITHOUT = """
import runpy, sys
for name in ("torch", "dynamo_backends", "jax", "safetensors"):
    sys.modules[name] = None  # importing it fails
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def ran(example: str, path: Path, call: Any) -> dict[str, np.ndarray]:
    """The results of an example's run on a file."""
    inputs, results = path.with_suffix(".npz"), path.with_suffix(".out.npz")
    (x,), kwargs = call
    np.savez(inputs, x=x.numpy(), **{name: t.numpy() for name, t in kwargs.items()})
    command = [sys.executable, "-c", WITHOUT, ROOT / "examples" / example, path, inputs, results]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(np.load(results))


def test_a_package_is_run_by_onnxruntime_alone(
    packages: Any, model: Small, call: Any, tmp_path: Path
):
    path = tmp_path / "m.dbp"
    path.write_bytes(packages("onnxrt").read_bytes())
    results, right = ran("load_with_onnxruntime.py", path, call), expected(model, call)
    assert list(results) == ["0", "1"]  # of three, the last one is None
    np.testing.assert_allclose(results["0"], right["states"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(results["1"], right["pooled"][0], rtol=1e-4, atol=1e-5)


def test_stablehlo_is_run_by_jaxlib_alone(model: Small, call: Any, tmp_path: Path):
    path = tmp_path / "m.stablehlo"
    dynamo_backends.export(model, path, *call, platforms=["cpu"])
    results, right = ran("load_with_jaxlib.py", path, call), expected(model, call)
    np.testing.assert_allclose(results["states"], right["states"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(results["pooled_0"], right["pooled"][0], rtol=1e-4, atol=1e-5)
    damaged = bytearray(path.read_bytes())
    damaged[damaged.index(b"ML\xefR") + 40] ^= 1  # of the program
    path.write_bytes(damaged)
    with pytest.raises(AssertionError, match=r"Bad CRC-32|is not what was written"):
        ran("load_with_jaxlib.py", path, call)
