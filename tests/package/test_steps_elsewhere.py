"""Training steps in files where something is missing: the class, versions, the backend."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dynamo_backends import FallbackRefusedError, PackageError, SaveError, load_step
from dynamo_backends.interface.backend import Availability
from dynamo_backends.interface.registry import get_backend
from dynamo_backends.package.steps.described import inner_of
from tests.bench.programs import ROOT
from tests.package.trained_steps import Training, batches, go_on, is_same, plain, simple, update

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


def test_of_other_versions_it_is_compiled_again(step_path: Path, monkeypatch: pytest.MonkeyPatch):
    expected = go_on(load_step(step_path), [{}])
    backend = get_backend("openxla")
    versions = {**backend.versions(), "jaxlib": "0.99.0"}
    monkeypatch.setattr(type(backend), "versions", lambda self: versions)
    with pytest.warns(
        UserWarning, match=r"compiled again from its portable graph: jaxlib .* 0\.99\.0"
    ):
        loaded = load_step(step_path)
    assert loaded.reports[0].cache_hits == 0
    torch.testing.assert_close(go_on(loaded, [{}]), expected, rtol=1e-4, atol=1e-4)
    assert not loaded.reports[0].events
    with pytest.raises(PackageError, match="strict=True does not allow"):
        load_step(step_path, strict=True)


def test_without_the_backend_it_runs_call_by_call(step_path: Path, monkeypatch: pytest.MonkeyPatch):
    expected = go_on(load_step(step_path), [{}])
    gone = Availability(False, "there is no jax")
    monkeypatch.setattr(type(get_backend("openxla")), "availability", lambda self: gone)
    with pytest.warns(
        UserWarning, match="runs in eager, operator by operator: openxla cannot run here"
    ):
        loaded = load_step(step_path)
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
    with pytest.warns(UserWarning, match="the package contains no executable"):
        step.save(tmp_path / "step.dbp")
    with pytest.warns(UserWarning, match="the package contains no executable of onnxrt"):
        loaded = load_step(tmp_path / "step.dbp")
    torch.testing.assert_close([loaded(x) for _ in range(3)], [step(x) for _ in range(3)])
    assert loaded.reports[0].verified == 1
    with pytest.raises(SaveError, match="more than one program"):
        inner_of("autotune")
