"""Tensors to XLA buffers and back; devices that cannot address torch's memory."""

import os
import threading
from collections.abc import Callable

import jax
import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from dynamo_backends.graph.normalize import normalize
from dynamo_backends.interface.executable import Bound
from dynamo_backends.runtime import device_values
from dynamo_backends.runtime.staging import LIMIT
from dynamo_backends.xla import _jaxlib
from dynamo_backends.xla.backend import OpenXLA
from dynamo_backends.xla.compiler import compile_graph
from dynamo_backends.xla.lowering.context import LoweringOptions
from dynamo_backends.xla.options import XlaOptions
from dynamo_backends.xla.runtime import PjrtDevice, open_device

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8,
          torch.bool, torch.complex64, torch.float8_e5m2)  # fmt: skip


def widen(tensor: torch.Tensor) -> torch.Tensor:
    """Some dtypes cannot be compared."""
    return tensor if tensor.is_complex() else tensor.double()


def remote() -> PjrtDevice:
    """A device of jax's own client, reached through host copies as one of another machine is."""
    handle = jax.local_devices(backend="cpu")[0]
    return PjrtDevice("remote", handle.client, handle, os.getpid())


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


@pytest.mark.parametrize("offset", [0, 1, 4, 15])
@pytest.mark.parametrize("rows", [1, 4000], ids="{} rows".format)
def test_imported_memory_is_ready_and_so_are_results(offset: int, rows: int):
    flat = torch.randint(-4, 5, (offset + rows * 512,)).float()  # all sums are exact
    weight = flat[offset:].view(rows, 512)
    device = open_device("cpu")
    traced = jax.jit(lambda x, w: x @ w.T).trace(
        jax.ShapeDtypeStruct((32, 512), "float32"), jax.ShapeDtypeStruct((rows, 512), "float32")
    )
    module = _jaxlib.bytecode(traced.lower(lowering_platforms=("cpu",)))
    executable = _jaxlib.compile_program(device.client, device.handle, module, fuses_products=True)
    call = _jaxlib.make_single_device_call(executable, device.handle)
    x = torch.randint(-4, 5, (32, 512)).float()
    buffers = device.import_tensors([x, weight])
    assert all(buffer.is_ready() for buffer in buffers)
    (result,) = call(buffers)
    assert result.is_ready()
    back = device.export_buffer(result, torch.device("cpu"))
    assert torch.equal(back, x @ weight.T)


def test_uploads_do_not_read_memory_after_the_call():
    tensor = torch.ones(1 << 22)
    device = remote()
    array = device.import_tensor(tensor)
    tensor.zero_()
    assert device.export_buffer(array, torch.device("cpu")).min() == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_cpu_client_shares_memory(dtype: torch.dtype):
    tensor = torch.ones(64).to(dtype)
    device = open_device("cpu")
    back = device.export_buffer(device.import_tensor(tensor), torch.device("cpu"))
    assert back.dtype == dtype
    assert back.data_ptr() == tensor.data_ptr()


def test_a_program_runs_on_a_device_that_needs_copies(monkeypatch: pytest.MonkeyPatch):
    device = remote()
    monkeypatch.setitem(device_values._homes, device.name, device)  # as `open_device` does
    compiled = compile_graph(
        captured(lambda x, y: ((x @ y).transpose(0, 1), x > 0), torch.ones(2, 3), torch.ones(3, 4)),
        device,
        LoweringOptions(platform=device.platform, matmul_precision="highest"),
    )
    run, copied = compiled.bind(())
    assert not copied
    x, y = torch.randn(2, 3), torch.randn(3, 4)
    product, positive = run([x, y])
    assert torch.equal(positive, x > 0)
    assert product.stride() == (x @ y).transpose(0, 1).stride()
    torch.testing.assert_close(product, (x @ y).transpose(0, 1))


def bind(function: Callable[..., object], *args: torch.Tensor) -> Bound:
    """A function compiled for the CPU; without weights."""
    options = LoweringOptions(platform="cpu", matmul_precision="highest", channels_last=True)
    return compile_graph(captured(function, *args), open_device("cpu"), options).bind(())[0]


LARGE = LIMIT // 4 + 1  # elements of float32


@pytest.mark.parametrize(
    "sizes", [(8, 8), (8, LARGE), (LARGE, LARGE)], ids=["small", "mixed", "large"]
)
def test_results_stay_when_inputs_and_later_calls_change(sizes: tuple[int, int]):
    run = bind(lambda x, y: (x + 1, y * 2, x.flip(0)), *map(torch.ones, sizes))
    x, y = map(torch.randn, sizes)
    expected = [x + 1, y * 2, x.flip(0)]
    results = run([x, y])
    x.zero_()
    y.zero_()
    run([x, y])
    for result, value in zip(results, expected, strict=True):
        assert torch.equal(result, value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(5, 8)[:, ::2],
        lambda: torch.randn(21)[1:].view(5, 4),
        lambda: torch.randn(5, 1).expand(5, 4),
        lambda: torch.randn(5, 4).requires_grad_(),
        lambda: torch.randn(5, 4, dtype=torch.complex64).conj().imag,
    ],
    ids=["gaps", "misaligned", "expanded", "requires grad", "negative bit"],
)
def test_small_inputs_of_any_kind(make: Callable[[], torch.Tensor]):
    run = bind(lambda x: (x * 3,), torch.ones(5, 4))
    with torch.inference_mode():
        run([torch.ones(5, 4)])
    for _ in range(2):
        x = make()
        (result,) = run([x])
        assert torch.equal(result, x.detach() * 3)
        assert not result.requires_grad


def test_another_shape_or_dtype_is_refused_and_does_no_harm():
    run = bind(lambda x: (x * 3,), torch.ones(5, 4))
    for wrong in (torch.ones(1, 4), torch.ones(5, 4, dtype=torch.float64)):
        text = r"compiled for torch.float32\[5, 4\], but called with"
        with pytest.raises(ValueError, match=text):
            run([wrong])
    assert torch.equal(run([torch.ones(5, 4)])[0], torch.full((5, 4), 3.0))


def test_calls_at_the_same_time_do_not_share_inputs():
    def slow(x: torch.Tensor) -> tuple[torch.Tensor]:
        y = x[0].expand(64, 64)
        for _ in range(20):
            y = y @ y
            y = y / y.max()
        return (y.sum() * 0 + x,)

    run = bind(slow, torch.ones(4))
    wrong: list[float] = []

    def work(value: float) -> None:
        for i in range(200):
            given = torch.full((4,), value + i)
            if not torch.equal(run([given])[0], given):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(1000.0 * k + 1,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def captured(function: Callable[..., object], *args: torch.Tensor):
    """A function as an inference graph in normal form."""
    module: fx.GraphModule = make_fx(function, tracing_mode="fake")(*args)
    return normalize(module, "inference", freeze=False).graph


def test_code_for_other_flags_of_xla_is_kept_apart(monkeypatch: pytest.MonkeyPatch):
    key = OpenXLA().cache_key(XlaOptions())
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_min_max=true")
    assert OpenXLA().cache_key(XlaOptions()) != key
