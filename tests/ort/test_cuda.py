"""ONNX Runtime on CUDA: what it is told, in what order it runs; its static memory on the CPU."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import dynamo_backends
from dynamo_backends import DeviceError, OptionError
from dynamo_backends.cudagraphs import device
from dynamo_backends.graph.normalize import normalize
from dynamo_backends.graph.precision import Tf32Settings, read_tf32_settings
from dynamo_backends.ort import backend as ort_backend
from dynamo_backends.ort import cuda, session
from dynamo_backends.ort.backend import OnnxRuntimeCUDA, OrtOptions, _of_trials, _settings
from dynamo_backends.ort.compiler import compile_graph
from dynamo_backends.ort.session import SessionSettings, run_options
from dynamo_backends.runtime.verdicts import TrialVerdict
from tests import refusals
from tests.cudagraphs.double import DoubleCuda

FLOAT32, BOTH = Tf32Settings(False, True), Tf32Settings(True, True)


@pytest.fixture
def torchs_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision(), torch._C._get_cudnn_allow_tf32()
    yield
    torch.set_float32_matmul_precision(before[0])
    allow_tf32_in_convolutions(before[1])


def allow_tf32_in_convolutions(allowed: bool) -> None:
    """Not as `torch.backends.cudnn.allow_tf32`, which torch's own test utilities lock."""
    torch._C._set_cudnn_allow_tf32(allowed)


@pytest.mark.parametrize(
    ("products", "convolutions"), [("highest", True), ("high", True), ("high", False)]
)
def test_tf32_follows_torch(torchs_precision: None, products: str, convolutions: bool):
    torch.set_float32_matmul_precision(products)
    allow_tf32_in_convolutions(convolutions)
    found = read_tf32_settings()
    assert found == Tf32Settings(products != "highest", convolutions)
    entries = cuda.cuda_provider_options(0, found, search=False, graphs=False)
    assert entries["use_tf32"] == str(int(products == "high" and convolutions))


def test_options_of_the_cuda_provider():
    assert cuda.cuda_provider_options(1, FLOAT32, search=True, graphs=True) == {
        "device_id": "1",
        "use_tf32": "0",
        "cudnn_conv_algo_search": "EXHAUSTIVE",
        "arena_extend_strategy": "kSameAsRequested",
        "enable_cuda_graph": "1",
    }
    first = cuda.cuda_provider_options(0, BOTH, search=False, graphs=False)
    assert not {"enable_cuda_graph", "device_id"} & first.keys()
    assert cuda.tensorrt_provider_options(1, None, graphs=False) == {"device_id": "1"}


def cuda_settings(**options: Any) -> SessionSettings:
    return _settings(refusals.graph_on("cuda").placeholders, OrtOptions(**options))


def test_tensorrt_comes_before_cuda_and_gets_the_users_options():
    settings = cuda_settings(
        provider="tensorrt", cudagraphs=True, provider_options={"trt_min_subgraph_size": "5"}
    )
    names = [name for name, _ in settings.providers]
    assert names == [cuda.TENSORRT, cuda.CUDA, cuda.CPU]
    first, second = (dict(entries) for _, entries in settings.providers[:2])
    assert first["trt_min_subgraph_size"] == "5"
    assert first["trt_cuda_graph_enable"] == "1"
    assert first["trt_engine_cache_path"].endswith("onnxrt-tensorrt")
    assert "enable_cuda_graph" not in second
    assert settings.graphs
    without = cuda_settings(provider="tensorrt", cache=False)
    assert dict(without.providers[0][1]) == {}


def test_a_trial_refuses_the_host_and_records_nothing():
    backend, options = OnnxRuntimeCUDA(), OrtOptions(provider="tensorrt", cudagraphs=True)
    graph = refusals.graph_on("cuda")
    seen: list[SessionSettings] = []

    def verdict(node: Any, compile_node: Any, settings: SessionSettings, keep: bool) -> Any:
        seen.append(settings)
        return TrialVerdict()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dynamo_backends.ort.trial.find_verdict", verdict)
        assert backend.supports(graph.placeholders[0], options)
    (settings,) = seen
    assert [name for name, _ in settings.providers] == [cuda.CUDA]
    assert "enable_cuda_graph" not in dict(settings.providers[0][1])
    assert dict(settings.config)[cuda.NO_HOST[0]] == "1"
    assert (settings.threads, settings.graphs) == (1, False)
    assert _of_trials(graph.placeholders[0], OrtOptions()).providers[0][0] == cuda.CUDA


def test_a_session_is_given_a_stream_that_is_not_the_default_one(monkeypatch: pytest.MonkeyPatch):
    double = DoubleCuda()
    double.side_stream(0).cuda_stream = 4711  # type: ignore[attr-defined]
    monkeypatch.setattr(device, "_driver", double)
    for name in (cuda.CUDA, cuda.TENSORRT):
        given = cuda.add_stream_option(name, {"use_tf32": "0"}, ("cuda", 0))
        assert given == {"use_tf32": "0", "user_compute_stream": "4711"}
    assert cuda.add_stream_option(cuda.CPU, {}, ("cuda", 0)) == {}


def test_runs_are_ordered_with_torchs_stream(monkeypatch: pytest.MonkeyPatch):
    double = DoubleCuda()
    monkeypatch.setattr(device, "_driver", double)
    x = torch.ones(3)
    with double.mode:
        x.add_(1)
        with cuda.ordered_with_torch(0), double.use(cuda.session_stream(0)):
            y = x * 2  # the session reads what torch has written
        z = y + x.mul_(3)  # and torch what the session has, and it writes to what that has read
    assert torch.equal(z, torch.full((3,), 10.0))


def test_the_host_waits_for_nothing_on_cuda():
    key = cuda.NO_SYNCHRONIZATION[0]
    assert run_options(cuda_settings()).get_run_config_entry(key) == "1"
    cpu = run_options(SessionSettings(((cuda.CPU, ()),)))
    with pytest.raises(RuntimeError, match="does not have configuration with key"):
        cpu.get_run_config_entry(key)


def static(*args: torch.Tensor) -> Any:
    """A function run as with CUDA graphs, in memory that stays where it is, on the CPU."""
    module = make_fx(lambda x, y: ((x @ y).relu() + 1, (x * 2).t(), x.sum()), tracing_mode="fake")(
        *args
    )
    graph = normalize(module, "inference", freeze=False).graph
    settings = SessionSettings(((cuda.CPU, ()),), graphs=True)
    return compile_graph(graph, settings).bind(())[0]


def test_static_memory_gives_each_call_its_own_results():
    run = static(torch.ones(3, 4), torch.ones(4, 5))
    kept = []
    for _ in range(4):
        x, y = torch.randn(3, 4), torch.randn(4, 5)
        expected = (x @ y).relu() + 1, (x * 2).t(), x.sum()
        results = run([x, y])
        for e, r in zip(expected, results, strict=True):
            torch.testing.assert_close(r, e)
            assert r.stride() == e.stride()
        kept.append((results, [r.clone() for r in results]))
    for results, copies in kept:
        assert all(map(torch.equal, results, copies))


def test_threads_do_not_mix_their_inputs_in_static_memory():
    run = static(torch.ones(3, 4), torch.ones(4, 5))
    wrong: list[float] = []

    def work(value: float) -> None:
        x, y = torch.full((3, 4), value), torch.ones(4, 5)
        results = [run([x, y])[1] for _ in range(50)]
        wrong.extend(value for r in results if not torch.equal(r, (x * 2).t()))

    threads = [threading.Thread(target=work, args=(float(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"cudagraphs": True}, "was called with cudagraphs=True, which needs CUDA inputs"),
        ({"provider": "tensorrt"}, "was called with provider='tensorrt', which needs CUDA inputs"),
    ],
)
def test_options_for_cuda_are_refused_on_the_cpu(options: dict[str, Any], text: str):
    compiler = dynamo_backends.compiler("onnxrt", **options)
    compiled = torch.compile(nn.Sigmoid(), backend=compiler)
    with pytest.raises(Exception, match=text) as info:
        compiled(torch.zeros(2))
    assert isinstance(refusals.cause(info), DeviceError)


def test_tensorrts_provider_needs_its_wheel_and_torchs_leave_for_tf32(
    monkeypatch: pytest.MonkeyPatch, torchs_precision: None
):
    monkeypatch.setattr(ort_backend, "_has_device", lambda kind: True)
    graph, options = refusals.graph_on("cuda"), OrtOptions(provider="tensorrt")
    monkeypatch.setattr(session, "available_providers", lambda: [cuda.CUDA, cuda.CPU])
    with pytest.raises(
        DeviceError, match="does not have this provider; run: pip uninstall onnxruntime"
    ):
        OnnxRuntimeCUDA().check_graph(graph, options)
    everything = [cuda.TENSORRT, cuda.CUDA, cuda.CPU]
    monkeypatch.setattr(session, "available_providers", lambda: everything)
    torch.set_float32_matmul_precision("highest")
    with pytest.raises(OptionError, match=r"Call torch.set_float32_matmul_precision\('high'\)"):
        OnnxRuntimeCUDA().check_graph(graph, options)
    torch.set_float32_matmul_precision("high")
    OnnxRuntimeCUDA().check_graph(graph, options)


@pytest.mark.skipif(
    not dynamo_backends.get_backend("onnxrt_cuda").availability().usable,
    reason="needs a CUDA device and onnxruntime-gpu",
)
@pytest.mark.parametrize("cudagraphs", [False, True])
def test_on_cuda(cudagraphs: bool):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).cuda()
    compiler = dynamo_backends.compiler("onnxrt_cuda", cudagraphs=cudagraphs)
    compiled = torch.compile(model, backend=compiler)
    with torch.no_grad():
        for _ in range(6):
            x = torch.randn(2, 3, 8, 8, device="cuda")
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-3, atol=1e-4)
