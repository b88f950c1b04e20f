"""Packages from another machine, or of other versions: right results with one warning, or no."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dynamo_backends
from dynamo_backends import PackageError
from dynamo_backends.interface.backend import Availability
from dynamo_backends.interface.registry import get_backend
from dynamo_backends.runtime import cpu_info
from tests.package.conftest import Small


@pytest.fixture(scope="module")
def path(packages: Any) -> Path:
    made: Path = packages("openxla")
    return made


def is_right_with_one_warning(path: Path, model: Small, call: Any, text: str) -> Any:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        module = dynamo_backends.load(path)
        result = module(*call[0], **call[1])
    (warning,) = told
    assert re.search(text, str(warning.message))
    with torch.no_grad():
        torch.testing.assert_close(result, model(*call[0], **call[1]))
    with pytest.raises(PackageError, match="strict=True does not allow"):
        dynamo_backends.load(path, strict=True)
    return module


def test_of_the_same_machine_nothing_is_said(path: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module = dynamo_backends.load(path)
    assert module.reports[0].cache_hits == 1


def test_another_torch(path: Path, model: Small, call: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    module = is_right_with_one_warning(
        path, model, call, r"torch was 2\.\S+ when saved and here 2\.99\.0"
    )
    assert module.reports[0].ops_on_backend > 0


def test_another_jaxlib(path: Path, model: Small, call: Any, monkeypatch: pytest.MonkeyPatch):
    backend = get_backend("openxla")
    versions = {**backend.versions(), "jaxlib": "0.99.0"}
    monkeypatch.setattr(type(backend), "versions", lambda self: versions)
    is_right_with_one_warning(path, model, call, r"jaxlib was 0\.\S+ when saved and here 0\.99\.0")


def test_a_processor_with_other_instructions(
    path: Path, model: Small, call: Any, monkeypatch: pytest.MonkeyPatch
):
    flags = " ".join(f for f in cpu_info.cpu_flags() if f != "sse2")
    monkeypatch.setattr(cpu_info, "_flags", lambda: f"flags : {flags} quantum")
    text = "this processor lacks sse2 and has quantum"
    is_right_with_one_warning(path, model, call, text)


def test_another_source_of_this_package(
    path: Path, model: Small, call: Any, monkeypatch: pytest.MonkeyPatch
):
    from dynamo_backends.package import machine

    monkeypatch.setattr(machine, "source_digest", lambda: "another")
    is_right_with_one_warning(path, model, call, "dynamo_backends .* and here .*another")


def test_another_number_of_threads(path: Path, model: Small, call: Any):
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        text = rf"torch had {threads} threads .* \(call torch.set_num_threads\({threads}\)\)"
        is_right_with_one_warning(path, model, call, text)
    finally:
        torch.set_num_threads(threads)


def test_without_the_backends_packages(
    path: Path, model: Small, call: Any, monkeypatch: pytest.MonkeyPatch
):
    missing = Availability(False, "jaxlib is not installed", "pip install jaxlib")
    monkeypatch.setattr(type(get_backend("openxla")), "availability", lambda self: missing)
    text = r"runs in eager: openxla cannot run here: jaxlib is not installed \(pip install jaxlib\)"
    module = is_right_with_one_warning(path, model, call, text)
    assert module.backend == "eager"


def test_an_executable_that_its_vendor_refuses_is_compiled(
    path: Path, model: Small, call: Any, rewritten: Callable[..., Path],
    caplog: pytest.LogCaptureFixture,
):  # fmt: skip
    def swap(manifest: Any, _: Any) -> None:
        for entry in manifest["executables"]:
            entry["parts"] = dict.fromkeys(entry["parts"], "graph.json")

    module = dynamo_backends.load(rewritten(path, swap))
    with torch.no_grad():
        torch.testing.assert_close(module(*call[0], **call[1]), model(*call[0], **call[1]))
    assert module.reports[0].cache_hits == 0
    assert module.reports[0].executables == 1
    assert "unusable" in caplog.text or module.reports[0].failures
