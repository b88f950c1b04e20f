"""What `doctor` says of GPUs: here, on a machine with nothing, and step by step to one with all."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
import torch

from dynamo_backends.bench.environment import driver_version
from dynamo_backends.cli import diagnose, doctor, main
from dynamo_backends.cli.doctor import GPU_BACKENDS, Facts, GpuBackend, lacks, machine_lacks
from dynamo_backends.interface.registry import get_backend, list_backends
from tests import refusals

NOTHING = Facts(devices=0, driver="", torch="2.13.0+cpu", built_for="", visible=())
ALL = Facts(1, "580.65.06", "2.13.0+cu130", "13.0", ("NVIDIA H200",))


def words(facts: Facts) -> str:
    return "; ".join(x.what for x in machine_lacks(facts))


def test_each_step_towards_a_gpu_is_named_until_nothing_is_missing():
    assert words(NOTHING) == (
        "this machine has no NVIDIA GPU; torch 2.13.0+cpu is built without CUDA"
    )
    device = dataclasses.replace(NOTHING, devices=1)
    assert (
        words(device)
        == "the NVIDIA driver is not installed; torch 2.13.0+cpu is built without CUDA"
    )
    driver = dataclasses.replace(device, driver="580.65.06")
    assert words(driver) == "torch 2.13.0+cpu is built without CUDA"
    hidden = dataclasses.replace(ALL, visible=())
    assert words(hidden) == "torch (built for CUDA 13.0) finds no device with driver 580.65.06"
    assert machine_lacks(ALL) == []


def test_where_the_bus_is_not_shown_only_the_driver_is_missed():
    assert words(dataclasses.replace(NOTHING, devices=None)).startswith(
        "the NVIDIA driver is not installed; "
    )


def test_each_backend_names_its_package_and_the_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = {b.name: lacks(b, ALL) for b in GPU_BACKENDS}
    assert {name for name, missing in found.items() if not missing} == {
        "autotune", "cudagraphs", "cudagraphs_eager"}  # fmt: skip
    (jax,) = found["openxla"]
    assert jax.what == "the package jax_cuda13_plugin or jax_cuda12_plugin is not installed"
    assert jax.remedy == "pip install 'jax[cuda13]'"
    for name, command in (
        ("tensorrt", "pip install tensorrt"),
        ("onnxrt_cuda", "pip install onnxruntime-gpu"),
        ("nvfuser", "pip install nvfuser"),
    ):
        (lack,) = found[name]
        assert "is not installed" in lack.what
        assert command in lack.remedy


def test_a_package_that_is_there_and_does_not_import_is_reported():
    def broken() -> str:
        raise ImportError("libcudnn.so.9: cannot open shared object file")

    backend = GpuBackend("x", ("torch",), "pip install x", broken)
    (lack,) = lacks(backend, ALL)
    assert lack.what.startswith("torch cannot be imported (ImportError: libcudnn.so.9")


def test_the_bus_and_the_driver_are_read_from_files(tmp_path: Path):
    for name, vendor, kind in (
        ("0000:00:00.0", "0x8086", "0x060000"),
        ("0000:01:00.0", "0x10de", "0x030200"),
        ("0000:01:00.1", "0x10de", "0x040300"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "class").write_text(kind + "\n")
    assert doctor._pci_devices(tmp_path) == 1
    assert doctor._pci_devices(tmp_path / "absent") is None
    line = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 06:54:38 UTC 2026"
    (tmp_path / "version").write_text(line)
    assert driver_version(tmp_path / "version") == "580.65.06"
    assert driver_version(tmp_path / "none") == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_doctor_works_without_any_gpu(capsys: pytest.CaptureFixture[str]):
    assert main(["doctor", "--json"]) == 0
    found = {c["name"]: c for c in json.loads(capsys.readouterr().out)}
    assert found["NVIDIA GPU"]["status"] == "missing"
    for backend in GPU_BACKENDS:
        row = found[f"{backend.name} on GPU"]
        assert row["status"] == "missing"
        assert row["remedy"]
    assert "pip install 'jax[cuda13]'" in found["openxla on GPU"]["remedy"]
    assert found["backend cudagraphs_eager"]["status"] == "missing"


def test_doctor_works_without_any_vendor_package():
    needed = [module for name in list_backends() for module in get_backend(name).packages]
    needed += [module for backend in GPU_BACKENDS for module in backend.modules]
    packages = tuple({module.partition(".")[0] for module in needed})
    then = (
        "from dynamo_backends.cli import main\n"
        "print('status', main(['doctor', '--json']), main(['list', '--json']))\n"
        "from dynamo_backends.cudagraphs import cudagraphs_eager\n"
        "print(cudagraphs_eager, torch.cuda.is_initialized())"
    )
    said = refusals.without("cudagraphs_eager", packages, then)
    assert "status 0 0" in said
    assert "the package onnxruntime is not installed" in said
    assert '"name": "nvfuser_cudagraphs"' in said
    assert said.endswith("compiler('cudagraphs_eager') False\n")


def test_a_broken_torch_does_not_stop_the_doctor(monkeypatch: pytest.MonkeyPatch):
    def broken() -> Facts:
        raise RuntimeError("driver and library version mismatch")

    monkeypatch.setattr(doctor, "collect_environment", broken)
    row = next(c for c in diagnose() if c.name == "NVIDIA GPU")
    assert (row.status, row.detail) == (
        "broken",
        "RuntimeError: driver and library version mismatch",
    )
