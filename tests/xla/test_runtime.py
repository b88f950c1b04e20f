"""Tensors to XLA buffers and back; devices that cannot address torch's memory."""

import dataclasses
import os
from collections.abc import Callable

import jax
import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from dynamo_backends.graph.normalize import normalize
from dynamo_backends.xla.compiler import compile_graph
from dynamo_backends.xla.lowering.context import LoweringOptions
from dynamo_backends.xla.runtime import Device, open_device

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8,
          torch.bool, torch.complex64, torch.float8_e5m2)  # fmt: skip


def widen(tensor: torch.Tensor) -> torch.Tensor:
    """Some dtypes cannot be compared."""
    return tensor if tensor.is_complex() else tensor.double()


def remote() -> Device:
    """A device of jax's own client, reached through host copies as one of another machine is."""
    handle = jax.devices("cpu")[0]
    return Device("remote", handle.client, handle, os.getpid())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (4, 5)], ids=str)
def test_copies_to_a_device_and_back_keep_every_bit(dtype: torch.dtype, shape: tuple[int, ...]):
    tensor = torch.randint(0, 2, shape).to(dtype)
    if dtype.is_floating_point:
        tensor = (tensor.double() * 3.14159265358979).to(dtype)
    device = remote()
    buffer = device.import_tensor(tensor)
    back = device.export_buffer(buffer, torch.device("cpu"))
    assert back.dtype == dtype
    assert torch.equal(widen(back), widen(tensor))
    assert tensor.numel() == 0 or back.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_cpu_client_shares_memory(dtype: torch.dtype):
    tensor = torch.ones(64).to(dtype)
    device = open_device("cpu")
    back = device.export_buffer(device.import_tensor(tensor), torch.device("cpu"))
    assert back.dtype == dtype
    assert back.data_ptr() == tensor.data_ptr()


def test_a_program_runs_on_a_device_that_needs_copies():
    device = remote()
    compiled = compile_graph(
        captured(lambda x, y: ((x @ y).transpose(0, 1), x > 0), torch.ones(2, 3), torch.ones(3, 4)),
        dataclasses.replace(device, platform="cpu"),
        LoweringOptions(platform="cpu", matmul_precision="highest", channels_last=True),
    )
    compiled._device = device
    run, copied = compiled.bind(())
    assert not copied
    x, y = torch.randn(2, 3), torch.randn(3, 4)
    product, positive = run([x, y])
    assert torch.equal(positive, x > 0)
    assert product.stride() == (x @ y).transpose(0, 1).stride()
    torch.testing.assert_close(product, (x @ y).transpose(0, 1))


def captured(function: Callable[..., object], *args: torch.Tensor):
    """A function as an inference graph in normal form."""
    module: fx.GraphModule = make_fx(function, tracing_mode="fake")(*args)
    return normalize(module, "inference", freeze=False).graph
