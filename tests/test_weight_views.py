"""Views of weights on every backend for CPUs; see `dynamo_backends.conformance.weights.views`."""

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.nn.functional import linear

import dynamo_backends
from dynamo_backends.conformance.subject import Subject
from dynamo_backends.conformance.weights.views import (
    CASES,
    FIRST,
    Pair,
    compare_frozen,
    compare_trained,
)
from tests import backend_checks as checks
from tests.rotation import long_if

BACKENDS = {
    **dict.fromkeys(["openxla", "onnxrt", "ov", "ts_trace", "ofi", "static_runtime"], CASES),
    **dict.fromkeys(["onednn_graph", "ltc", "ltc_trace"], CASES),
    **dict.fromkeys(["tvm", "iree", "inductor_freezing"], FIRST),
}


def _ran(reports: list[dynamo_backends.GraphReport]) -> None:
    assert reports
    assert all(r.ops_on_backend > 0 and not r.runtime_fallbacks for r in reports), reports


@pytest.mark.parametrize("backend", BACKENDS)
def test_frozen_weights(backend: str):
    pair, subject = Pair.of(BACKENDS[backend]), Subject(backend)
    with subject.watching() as reports:
        compare_frozen(subject.compile(pair.module), pair)
    _ran(reports)


@pytest.mark.parametrize(
    "backend",
    [
        long_if(b == "ov" or cases is FIRST, b)
        for b, cases in BACKENDS.items()
        if b != "static_runtime"
    ],
)
def test_trained_weights(backend: str):
    pair, subject = Pair.of(BACKENDS[backend]), Subject(backend)
    with subject.watching() as reports:
        compare_trained(subject.compile(pair.module), pair)
    _ran(reports)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_products_of_inductor_that_pack_constants():
    n = 64
    memory = torch.randn(4 * n * n)

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.late = nn.Parameter(memory[n * n : 2 * n * n].view(n, n))
            self.attention = nn.MultiheadAttention(n, 4, batch_first=True)

        def forward(self, query: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
            return linear(keys[0], self.late), self.attention(query, keys, keys)[0]

    module, inputs = Module().eval(), (torch.randn(1, 1, n), torch.randn(1, 16, n))
    seen: list[torch.fx.Graph] = []
    settings = {
        "max_autotune_gemm_backends": "CPP",  # no other kernels than those that were wrong
        "post_grad_custom_post_pass": seen.append,  # a user's own, which is still called
    }
    with torch.no_grad(), torch._inductor.config.patch(settings):
        checks.agree("inductor_max_autotune", module, *inputs, verify="off")
    assert seen
