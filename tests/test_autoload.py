"""`torch.compile(backend="openxla")`, and `tvm`, in processes that never import this package."""

import importlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COMPILE = """
import torch
m = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).eval()
x = torch.randn(3, 4)
with torch.no_grad():
    assert torch.allclose(torch.compile(m, backend="openxla")(x), m(x), atol=1e-5)
"""


def run(code: str, **environment: str) -> str:
    """Runs code in a fresh interpreter and returns what it printed."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


NAMES = "import json, torch; print(json.dumps(torch._dynamo.list_backends()))"


def names_all(printed: str) -> bool:
    return {"openxla", "tvm", "inductor"} <= set(json.loads(printed))


def test_openxla_works_without_an_import_and_is_listed():
    assert names_all(run(COMPILE + NAMES))


@pytest.mark.long
def test_tvm_works_without_an_import():
    run(COMPILE.replace("openxla", "tvm"))


@pytest.mark.parametrize("before", [pytest.param("", marks=pytest.mark.long), "torch._dynamo, "])
def test_openxla_works_with_autoload_off_after_an_import(before: str):
    run(f"import {before}dynamo_backends\n{COMPILE}", TORCH_DEVICE_BACKEND_AUTOLOAD="0")


@pytest.mark.long
def test_with_autoload_off_and_no_import_torchs_own_error_remains():
    code = COMPILE.replace("with torch.no_grad():", "try:").replace(
        "atol=1e-5)", "atol=1e-5)\nexcept Exception as e: print(type(e.__cause__ or e).__name__)"
    )
    out = run(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert "ImportError" in out or "BackendCompilerFailed" in out


@pytest.mark.long
def test_list_backends_still_works_after_an_import():
    assert names_all(run(f"import dynamo_backends; {NAMES}"))


def test_import_torch_loads_next_to_nothing_of_ours():
    code = (
        "import torch, sys, json; "
        "print(json.dumps([m for m in sys.modules if m.split('.')[0] in "
        "('dynamo_backends', 'jax', 'jaxlib', 'rich', 'platformdirs', 'tvm', 'tvm_ffi')]))"
    )
    ours = {f"dynamo_backends.{name}" for name in ("_autoload", "_lazy")}
    assert set(json.loads(run(code))) == {"dynamo_backends", *ours}


def test_an_exception_in_the_entry_point_never_breaks_import_torch(
    monkeypatch: pytest.MonkeyPatch,
):
    from dynamo_backends import _autoload

    def fail(_: Any) -> None:
        raise RuntimeError("no")

    importlib.import_module("torch._dynamo.backends.torchxla")  # so that there is a stub to replace
    called = []
    monkeypatch.setattr(_autoload, "_replace", lambda module: called.append(module) or fail(module))
    _autoload.autoload()
    assert called


def test_tensors_on_torch_xlas_device_go_to_torchs_own_function():
    from dynamo_backends._autoload import _Replacement

    class OnXla:
        class device:
            type = "xla"

    taken = []
    theirs = lambda gm, inputs: taken.append(inputs) or gm  # noqa: E731
    replacement = _Replacement("openxla", "dynamo_backends.xla", theirs)
    assert replacement("graph", [OnXla()]) == "graph"
    assert len(taken) == 1


LOGS = """
import logging, sys, torch
print(sorted(m for m in sys.modules if m.startswith("dynamo_backends")))
torch.compile(lambda x: x.sin() + 1, backend="openxla")(torch.ones(3))
logger = logging.getLogger("dynamo_backends")
print(logger.level, len(logger.handlers), logger.propagate)
"""


@pytest.mark.parametrize("autoload", ["1", "0"])
def test_torch_logs_shows_the_log(autoload: str, tmp_path: Path):
    environment = {"TORCH_LOGS": "+dynamo_backends", "TORCH_LOGS_OUT": str(tmp_path / "log")}
    run("import dynamo_backends\n" + LOGS, **environment, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload)
    (line,) = [x for x in (tmp_path / "log").read_text().splitlines() if "was compiled" in x]
    assert "openxla: the inference graph of capture 1 was compiled in" in line
    assert "[0/0]" in line, "torch's format has Dynamo's compilation"


@pytest.mark.long
def test_torch_logs_loads_nothing_of_ours_and_is_found_before_it_is_read():
    loaded, state = run(LOGS, TORCH_LOGS="+dynamo_backends").splitlines()
    assert loaded == "['dynamo_backends', 'dynamo_backends._autoload', 'dynamo_backends._lazy']"
    assert state == f"{logging.DEBUG} 1 False"


@pytest.mark.long
def test_the_logger_is_the_users_where_torch_logs_does_not_name_it():
    _, state = run(LOGS, TORCH_LOGS="+inductor").splitlines()
    assert state == f"{logging.NOTSET} 0 True"
