"""XLA on CUDA: shared memory and the order of streams, with a double of CUDA that finds races.

The program itself is computed by XLA on the CPU, on a stream of its own.
"""

import os
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dynamo_backends.cudagraphs import device
from dynamo_backends.graph.normalize import normalize
from dynamo_backends.graph.precision import Tf32Settings
from dynamo_backends.interface.executable import Bound
from dynamo_backends.xla import _jaxlib, backend, cuda, runtime
from dynamo_backends.xla import options as options_module
from dynamo_backends.xla.backend import OpenXLA
from dynamo_backends.xla.compiler import _trace, compile_graph
from dynamo_backends.xla.lowering.context import LoweringOptions
from dynamo_backends.xla.lowering.interpreter import GraphLowering
from dynamo_backends.xla.options import XlaOptions
from dynamo_backends.xla.runtime import PjrtDevice, open_device
from tests.cudagraphs.double import DoubleCuda, Race, Stream

STREAM = 77  # XLA's, on which buffers of torch's memory become ready


class DoubleXla:
    """XLA on the double of CUDA.

    Attributes:
        cuda: The double.
        stream: XLA's.
        read: Tensors whose memory was imported, in order.
        waits: How often XLA's stream was made to wait for torch's.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.cuda, self.stream = DoubleCuda(), Stream("xla")
        self.cuda.outside[STREAM] = self.stream
        self.read: list[torch.Tensor] = []
        self.waits = 0
        real = open_device("cpu")
        importing, exporting = _jaxlib.import_dlpack, _jaxlib.export_dlpack
        wait = self.cuda.wait_outside

        def wait_outside(handle: int, index: int) -> None:
            self.waits += 1
            wait(handle, index)

        def import_dlpack(tensor: torch.Tensor, handle: Any, stream: int) -> Any:
            assert stream == STREAM
            self.read.append(tensor)
            return importing(torch._C._to_dlpack(tensor), real.handle, None)

        def export_dlpack(buffer: Any, stream: int) -> Any:
            current = self.cuda.current_stream(0)
            assert stream == current.cuda_stream
            current.wait_stream(self.stream)
            return exporting(buffer)

        monkeypatch.setattr(device, "_driver", self.cuda)
        monkeypatch.setattr(self.cuda, "wait_outside", wait_outside)
        monkeypatch.setattr(cuda, "to_dlpack", lambda tensor: tensor)
        monkeypatch.setattr(_jaxlib, "import_dlpack", import_dlpack)
        monkeypatch.setattr(_jaxlib, "export_dlpack", export_dlpack)
        handle = SimpleNamespace(get_stream_for_external_ready_events=lambda: STREAM)
        self.device = PjrtDevice("cuda", real.client, handle, os.getpid(), 0)

    def bind(self, function: Callable[..., Any], *args: torch.Tensor) -> Bound:
        """A function compiled for the double."""
        module = make_fx(function, tracing_mode="fake")(*args)
        graph = normalize(module, "inference", freeze=False).graph
        options = LoweringOptions(platform="cpu", channels_last=False)
        compiled = compile_graph(graph, open_device("cpu"), options)
        compiled._device = self.device
        execute = compiled._execute

        def on_stream(buffers: list[Any]) -> list[Any]:
            self.stream.tick()
            for tensor in self.read:
                self.cuda.mode._access(self.stream, tensor, write=False)
            return execute(buffers)

        compiled._execute = on_stream
        return compiled.bind(())[0]


@pytest.fixture
def xla(monkeypatch: pytest.MonkeyPatch) -> DoubleXla:
    open_device("cpu")  # before anything of jaxlib is replaced
    return DoubleXla(monkeypatch)


def plain(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x @ y, (x * 2).t(), y.sum()


def test_memory_is_shared_and_one_wait_serves_all_inputs(xla: DoubleXla):
    run = xla.bind(plain, torch.ones(4, 8), torch.ones(8, 4))
    for call in range(1, 4):
        x, y = torch.randn(4, 8), torch.randn(8, 4)
        results = run([x, y])
        assert [t.data_ptr() for t in xla.read] == [x.data_ptr(), y.data_ptr()]
        assert xla.waits == call
        for e, r in zip(plain(x, y), results, strict=True):
            torch.testing.assert_close(r, e)
            assert r.stride() == e.stride()
        xla.read.clear()


def test_streams_are_ordered_without_the_host(xla: DoubleXla):
    run = xla.bind(plain, torch.ones(4, 8), torch.ones(8, 4))
    x, y = torch.randn(4, 8), torch.randn(8, 4)
    with xla.cuda.mode:
        for _ in range(3):
            x.add_(1)
            expected = x @ y
            product = run([x, y])[0]
            x.mul_(0.5)  # XLA has read it by then
            torch.testing.assert_close(product, expected)


def test_the_double_finds_a_missing_wait_in_either_direction(
    xla: DoubleXla, monkeypatch: pytest.MonkeyPatch
):
    run = xla.bind(plain, torch.ones(4, 8), torch.ones(8, 4))
    x, y = torch.randn(4, 8), torch.randn(8, 4)
    with xla.cuda.mode:
        x.add_(1)
        with monkeypatch.context() as patch:
            patch.setattr(xla.cuda, "wait_outside", lambda handle, index: None)
            with pytest.raises(Race, match="xla did not wait"):
                run([x, y])
        xla.read.clear()
        run([x, y])
        xla.stream.tick()
        xla.cuda.mode._access(xla.stream, x, write=False)  # a read that torch did not wait for
        with pytest.raises(Race, match="main writes to what xla may be reading"):
            x.mul_(2)


def test_memory_that_is_not_aligned_is_copied(xla: DoubleXla):
    run = xla.bind(lambda x: (x * 3,), torch.ones(5, 4))
    x = torch.randn(21)[1:].view(5, 4)
    assert torch.equal(run([x])[0], x * 3)
    (read,) = xla.read
    assert read.data_ptr() != x.data_ptr()
    assert read.data_ptr() % 64 == 0


def test_tensors_of_another_device_are_copied(xla: DoubleXla):
    second = PjrtDevice("cuda", xla.device.client, xla.device.handle, os.getpid(), 1)
    assert xla.device.shares_with(torch.device("cpu"))
    assert not second.shares_with(torch.device("cpu"))
    assert not xla.device.shares_with(torch.device("meta"))


def test_preallocation_is_off_while_the_client_starts_and_at_no_other_time(
    monkeypatch: pytest.MonkeyPatch,
):
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    seen: list[str | None] = []

    def devices(backend: str) -> list[Any]:
        seen.append(os.environ.get(name))
        return [SimpleNamespace(client=None)]

    monkeypatch.setattr(jax, "local_devices", devices)
    monkeypatch.delenv(name, raising=False)
    assert runtime._connect("cuda", 0).index == 0
    assert (seen, name in os.environ) == (["false"], False)
    monkeypatch.setenv(name, "true")
    runtime._connect("cuda", 0)
    assert (seen[-1], os.environ[name]) == ("true", "true")


@pytest.mark.parametrize(
    ("allowed", "products", "convolutions"),
    [
        (Tf32Settings(False, False), "highest", "highest"),
        (Tf32Settings(False, True), "highest", "default"),
        (Tf32Settings(True, True), "high", "default"),
        (Tf32Settings(True, False), "high", "high"),
    ],
)
def test_tf32_follows_torchs_two_switches(
    monkeypatch: pytest.MonkeyPatch, allowed: Tf32Settings, products: str, convolutions: str
):
    monkeypatch.setattr(options_module, "read_tf32_settings", lambda: allowed)
    asked = "high" if allowed.products else "highest"
    monkeypatch.setattr(options_module, "float32_matmul_precision", lambda: asked)
    options = options_module.lowering_options("cuda", XlaOptions())
    assert (options.matmul_precision, options.convolution_precision) == (products, convolutions)
    on_cpu = options_module.lowering_options("cpu", XlaOptions())
    assert on_cpu.convolution_precision == on_cpu.matmul_precision
    fixed = options_module.lowering_options("cuda", XlaOptions(matmul_precision="highest"))
    assert fixed.convolution_precision == "highest"


def test_convolutions_have_a_precision_of_their_own():
    def net(x: torch.Tensor, w: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.nn.functional.conv2d(x, w).flatten(1) @ m,)

    module = make_fx(net, tracing_mode="fake")(
        torch.ones(1, 9, 8, 8), torch.ones(4, 9, 5, 5), torch.ones(64, 3)
    )
    graph = normalize(module, "inference", freeze=False).graph
    options = LoweringOptions("cuda", "highest", "default", channels_last=False)
    program = str(_trace(graph, GraphLowering(graph.module.graph, options)))
    pattern = r"(conv_general_dilated|dot_general)\[.*?precision=\(Precision.(\w+)"
    found = re.findall(pattern, program, re.DOTALL)
    assert found == [("conv_general_dilated", "DEFAULT"), ("dot_general", "HIGHEST")]


def test_code_for_gpus_is_kept_apart_by_gpu(monkeypatch: pytest.MonkeyPatch):
    plain_key = OpenXLA().cache_key(XlaOptions())
    monkeypatch.setattr(backend, "cuda_cache_key", lambda: "NVIDIA H200 (9, 0)")
    assert OpenXLA().cache_key(XlaOptions()) != plain_key


@pytest.mark.skipif(
    "cuda" not in OpenXLA().availability().devices, reason="needs CUDA and jax's plugin for it"
)
def test_on_cuda():
    import dynamo_backends

    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten())
    model = model.cuda()
    compiled = torch.compile(model, backend=dynamo_backends.compiler("openxla"))
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(2, 3, 16, 16, device="cuda")
            expected = model(x)
            result = compiled(x)
            x.zero_()
            torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3)
