"""TPUs, as a pod of two processes has them: which are ours, and what code for them depends on."""

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from jax._src import xla_bridge

from dynamo_backends.interface.errors import DeviceError
from dynamo_backends.xla import _jaxlib, backend, runtime
from dynamo_backends.xla.backend import OpenXLA
from dynamo_backends.xla.options import XlaOptions
from dynamo_backends.xla.runtime import open_device


def chip(number: int, process: int, version: str = "TFRT TPU v6 lite, built in May") -> Any:
    """A TPU of one of the processes of a pod."""
    client = SimpleNamespace(platform_version=version, process_index=lambda: 1)
    return SimpleNamespace(
        id=number, process_index=process, client=client, device_kind="TPU v6 lite"
    )


@pytest.fixture
def pod(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The chips of a pod of two processes, in the second of them."""
    chips = [chip(number, process=number // 2) for number in range(4)]
    client = SimpleNamespace(devices=lambda: chips, process_index=lambda: 1)
    monkeypatch.setattr(xla_bridge, "get_backend", lambda platform=None: client)
    # Devices that other tests have opened stay open.
    monkeypatch.setattr(runtime, "_open", functools.cache(runtime._connect))
    caches: list[Any] = [backend.tpu_cache_key, backend.has_tpu]
    caches += [xla_bridge.local_devices, xla_bridge.process_count]
    for function in caches:
        function.cache_clear()
    yield chips
    for function in caches:
        function.cache_clear()


def test_devices_are_those_of_this_process(pod: list[Any]):
    assert [open_device("tpu", i).handle.id for i in range(2)] == [2, 3]
    with pytest.raises(
        DeviceError, match="XLA finds 2 tpu devices, so there is no device number 2"
    ):
        open_device("tpu", 2)


def test_code_for_tpus_is_kept_apart_by_chip_and_library(pod: list[Any]):
    keys = {OpenXLA().cache_key(XlaOptions(device="tpu"))}
    for name, value in (("device_kind", "TPU v5p"), ("client", chip(2, 1, "June").client)):
        setattr(pod[2], name, value)
        backend.tpu_cache_key.cache_clear()
        keys.add(OpenXLA().cache_key(XlaOptions(device="tpu")))
    keys.add(OpenXLA().cache_key(XlaOptions()))
    assert len(keys) == 4


def test_a_tpu_is_listed(pod: list[Any], monkeypatch: pytest.MonkeyPatch):
    chips = [(4, 6)]
    name = "num_available_tpu_chips_and_device_id"
    monkeypatch.setattr(_jaxlib.hardware_utils, name, lambda: chips[-1])
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    without = OpenXLA().availability().devices
    backend.has_tpu.cache_clear()
    monkeypatch.setenv("TPU_LIBRARY_PATH", "/libtpu.so")
    assert OpenXLA().availability().devices == (*without, "tpu")
    backend.has_tpu.cache_clear()
    chips.append((0, None))
    assert OpenXLA().availability().devices == without
