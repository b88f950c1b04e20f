"""The TorchScript backends: right, quiet, and no setting of TorchScript stays changed."""

import threading
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import dynamo_backends
from dynamo_backends.conformance.operators import database, running
from dynamo_backends.conformance.weights.changes import CHANGES, net
from dynamo_backends.interface.registry import get_backend
from dynamo_backends.torchscript import backend as backends
from dynamo_backends.torchscript import runtime as scripting
from tests import backend_checks as checks
from tests import refusals

NAMES = ["ts_trace", "ofi", "static_runtime", "onednn_graph"]


def unusable(name: str) -> str:
    available = get_backend(name).availability()
    return "" if available.usable else available.reason


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    if reason := unusable(request.param):
        pytest.skip(reason)
    return str(request.param)


@pytest.mark.parametrize("what", checks.SEMANTICS)
def test_semantics(name: str, what: str):
    fn, inputs = checks.SEMANTICS[what]
    with torch.no_grad():
        checks.agree(name, fn, *inputs())


def test_results_may_be_written_to(name: str):
    compiled = torch.compile(lambda x: ((x + 1).relu(), x[:0].exp()), backend=name)
    x = torch.randn(3, 4)
    with torch.no_grad():
        result, empty = compiled(x)
        torch.testing.assert_close(result.add_(1), (x + 1).relu() + 1)
        assert empty.resize_(2, 4).shape == (2, 4)
    with torch.inference_mode():
        assert compiled(x)[0].is_inference()


def test_changed_weights_are_seen(name: str):
    checks.never_stale(name, list(CHANGES))


def test_weights_that_keep_changing_become_inputs(name: str):
    module, x = net(), torch.randn(2, 4, 4, 4)
    compiled = torch.compile(module, backend=dynamo_backends.compiler(name))
    with torch.no_grad():
        for _ in range(8):
            module[0].weight.mul_(0.9)
            torch.testing.assert_close(compiled(x), module(x))


def test_dynamic_batch(name: str):
    checks.follows_the_batch(name)


def test_gradients(name: str):
    checks.gradients_agree(name)


@pytest.mark.parametrize("op", ["softmax", "linalg.cholesky", "index_put", "nn.functional.gelu"])
def test_operators(name: str, op: str):
    info = database.find(op)
    outcome = running.run(info, torch.float32, name, limit=1)
    assert outcome.status in ("native", "fallback"), dict(outcome.reasons)


def test_no_deprecation_reaches_the_user_and_no_filter_stays(name: str):
    filters = list(warnings.filters)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        inside = list(warnings.filters)
        checks.agree(name, net(), torch.randn(2, 4, 4, 4))
        assert warnings.filters == inside
    assert [str(w.message) for w in caught if "torch.jit" in str(w.message)] == []
    assert warnings.filters == filters


def settings() -> dict[str, Any]:
    c = torch._C
    return {
        "cpu": c._jit_can_fuse_on_cpu(),
        "gpu": c._jit_can_fuse_on_gpu(),
        "nnc": c._jit_texpr_fuser_enabled(),
        "onednn": c._jit_llga_enabled(),
        "optimize": c._get_graph_executor_optimize(),
    }


def test_settings_of_torchscript_are_put_back(name: str):
    before = settings()
    with torch.no_grad():
        checks.agree(name, net(), torch.randn(2, 4, 4, 4))
    assert settings() == before


def test_four_threads_at_once(name: str):
    module = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).eval()
    compiled = torch.compile(module, backend=dynamo_backends.compiler(name))
    inputs = [torch.randn(5, 32) for _ in range(4)]
    with torch.no_grad():
        compiled(inputs[0])
        expected = [module(x) for x in inputs]
    wrong: list[int] = []

    def work(i: int) -> None:
        with torch.no_grad():
            results = [compiled(inputs[i]) for _ in range(30)]
        wrong.extend(i for r in results if not torch.allclose(r, expected[i], atol=1e-5))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.long
def test_they_need_no_vendors_package():
    vendors = ("jax", "jaxlib", "onnx", "onnxruntime", "onnxscript", "openvino", "tvm", "iree")
    then = (
        f"for name in {NAMES[1:]}:\n"
        "    print(name, torch.compile(torch.exp, backend=name)(torch.zeros(2)).tolist())\n"
    )
    said = refusals.without("ts_trace", vendors, then).splitlines()[1:]
    assert said == ["[0.5, 0.5]", *(f"{name} [1.0, 1.0]" for name in NAMES[1:])]


def test_a_torch_without_static_runtime(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(torch._C, "_jit_to_static_module")
    text = "was built without Static Runtime. To fix it: pip install --force-reinstall torch"
    refusals.backend_is_refused("static_runtime", text)


def test_a_torch_without_the_fuser(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scripting, "onednn_graph_is_there", lambda: False)
    text = "the fuser for oneDNN Graph. To fix it: pip install --force-reinstall torch"
    refusals.backend_is_refused("onednn_graph", text)


@pytest.mark.parametrize("name", ["ts_trace", "ofi", "static_runtime", "onednn_graph", "nnc"])
def test_a_torch_without_torchscript(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(torch._C, "_create_function_from_graph")
    refusals.backend_is_refused(name, "has no TorchScript any more")


@pytest.mark.skipif(torch._C._llvm_enabled(), reason="this torch has LLVM, so NNC is usable")
def test_nnc_without_llvm_is_refused_with_the_reason():
    with pytest.raises(dynamo_backends.BackendUnavailableError, match="built without LLVM"):
        torch.compile(lambda x: x + 1, backend="nnc")(torch.ones(3))


def test_nnc_is_right_where_it_can_generate_code(monkeypatch: pytest.MonkeyPatch):
    # Without LLVM, NNC can interpret what it would have compiled.
    monkeypatch.setattr(backends, "has_llvm", lambda: True)
    before = torch._C._jit_get_te_must_use_llvm_cpu()
    torch._C._jit_set_te_must_use_llvm_cpu(False)
    try:
        compiled = torch.compile(lambda x: (x * 2 + 1).tanh() * x.sigmoid(), backend="nnc")
        x = torch.randn(3, 4)
        for _ in range(4):
            expected = (x * 2 + 1).tanh() * x.sigmoid()
            torch.testing.assert_close(compiled(x), expected)
        fused = str(torch._C._last_executed_optimized_graph())
    finally:
        torch._C._jit_set_te_must_use_llvm_cpu(before)
    assert "TensorExpr" in fused


def test_a_stride_dependent_operator_is_refused():
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return torch.as_strided(y, (2, 2), (1, 2)) + 1

    reports = checks.agree("ofi", fn, torch.randn(4, 4), min_block_size=1)
    reasons = [f.reason for r in reports for f in r.fallbacks]
    assert any("depends on the strides" in reason for reason in reasons)
