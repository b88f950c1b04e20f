"""What OpenVINO is trusted with: the reasons for a refusal, and that refusals are few."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import dynamo_backends
from dynamo_backends import CompileError, FallbackRefusedError, LoweringError
from dynamo_backends.graph.graph import Graph
from dynamo_backends.openvino import exclusions, trial
from dynamo_backends.openvino.compiler import compile_graph
from dynamo_backends.openvino.core_api import CompileSettings
from dynamo_backends.runtime.verdicts import TrialVerdict, VerdictStore


def refusals(fn: Callable[..., Tensor], *inputs: Tensor) -> str:
    """The reasons for what runs in eager, in one text."""
    function = torch.compile(fn, backend="ov", options={"min_block_size": 1})
    with torch.no_grad(), dynamo_backends.record() as reports:
        torch.testing.assert_close(function(*inputs), fn(*inputs), equal_nan=True)
    return "; ".join(f"{f.op}: {f.reason}" for r in reports for f in r.fallbacks)


@pytest.mark.parametrize(
    ("fn", "x", "reason"),
    [
        (
            torch.lgamma,
            torch.rand(4),
            "frontend cannot convert it: OpenVINO has no conversion rule",
        ),
        (lambda x: x.sort()[0], torch.arange(4), "64-bit integers in 32 bits"),
        (lambda x: x * 2, torch.rand(4).cfloat(), "does not compute with torch.complex64"),
        (lambda x: x * 2, torch.rand(4).double(), "OpenVINO computes float64 in float32"),
        (lambda x: F.max_pool1d(x, 2), torch.rand(2, 16), "is less precise than eager's"),
        (lambda x: x.sum(), torch.arange(70_000), "torch cannot decompose it"),
        (lambda x: x % 0.3, torch.rand(4), "loses all precision"),
        (lambda x: x.fmod(0.3), torch.rand(4), "loses all precision"),
    ],
    ids=["no rule", "int64", "complex", "float64", "pool", "long sum", "remainder", "fmod"],
)
def test_a_refusal_has_its_reason(fn: Callable[..., Tensor], x: Tensor, reason: str):
    assert reason in refusals(fn, x)


def test_large_calls_that_split_their_rows():
    assert refusals(lambda x: sum(t * 2 for t in x.unbind(0)), torch.randn(3, 400_000)) == ""


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: F.elu(x, 0.5) + F.hardtanh(x),
        lambda x: F.layer_norm(x, (8,)),
        lambda x: F.scaled_dot_product_attention(x, x, x),
        lambda x: x.softmax(-1) + F.max_pool2d(x, 3, 1, 1),
        lambda x: x.var(-1) + x.std(-1, correction=0),
        lambda x: x.sum(-1, dtype=torch.float32) * torch.ones(1, dtype=torch.bfloat16),
        lambda x: F.interpolate(x, scale_factor=2, mode="nearest"),
        lambda x: F.interpolate(x, size=(5, 11), mode="bilinear"),
        lambda x: F.interpolate(x, scale_factor=1.7, mode="bicubic"),
    ],
)
def test_what_networks_are_made_of_is_taken(fn: Callable[..., Tensor]):
    assert refusals(fn, torch.randn(2, 4, 8, 8)) == ""


def test_an_answer_is_remembered_whatever_the_sizes_are(monkeypatch: pytest.MonkeyPatch):
    assert refusals(torch.sinh, torch.randn(3, 7)) == ""
    tried: list[object] = []
    monkeypatch.setattr(trial, "_try", lambda *args: tried.append(args))
    assert refusals(torch.sinh, torch.randn(4, 9)) == ""
    assert tried == []


def test_every_operator_that_is_taken_whole_exists():
    assert len(exclusions.undecomposed_operators()) == len(exclusions.WHOLE)


def gradients(fn: Callable[..., Tensor], *inputs: Tensor) -> dynamo_backends.GraphReport:
    """The report of the forward graph; gradients are compared with eager's."""
    given = [[x.clone().requires_grad_() for x in inputs] for _ in range(2)]
    with dynamo_backends.record() as reports:
        torch.compile(fn, backend="ov")(*given[0]).square().sum().backward()
    fn(*given[1]).square().sum().backward()
    for mine, right in zip(*given, strict=True):
        torch.testing.assert_close(mine.grad, right.grad)
    return next(r for r in reports if r.kind == "forward")


def test_what_it_cannot_take_whole_is_decomposed():
    """Its frontend gives one result of a norm and of attention; training needs the others too."""

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (8,), weight, bias).tanh()

    report = gradients(norm, torch.randn(4, 8), torch.randn(8), torch.randn(8))
    assert not report.fallbacks
    query = torch.randn(2, 3, 5, 8)
    assert not gradients(F.scaled_dot_product_attention, query, query, query).fallbacks


def test_a_late_failure_names_its_node(monkeypatch: pytest.MonkeyPatch):
    """A call that a trial let pass by mistake."""
    monkeypatch.setattr(trial, "_try", lambda node, settings, known: TrialVerdict())
    monkeypatch.setattr(trial, "_verdicts", VerdictStore("ov", (), shipped=False))

    def fn(x: Tensor) -> Tensor:
        return torch.lgamma(x.sigmoid()).tanh()

    assert "aten.lgamma.default: OpenVINO's frontend cannot convert it" in refusals(
        fn, torch.rand(4)
    )
    with pytest.raises(Exception, match="lgamma") as info:
        torch.compile(fn, backend="ov", options={"fallback": "error"})(torch.rand(4))
    inner = getattr(info.value, "inner_exception", info.value)
    assert isinstance(inner, FallbackRefusedError)


def test_a_lowering_error_is_raised_for_the_one_call_at_fault():
    def fn(x: Tensor) -> Tensor:
        return torch.digamma(x.sigmoid()).tanh()

    with torch.no_grad(), dynamo_backends.record() as reports:
        torch.compile(fn, backend="ov")(torch.rand(4))
    graph: Graph = reports[0].executable._graph
    with pytest.raises((LoweringError, CompileError)) as info:
        compile_graph(graph, CompileSettings())
    assert isinstance(info.value, LoweringError)
    assert info.value.node_name in {n.name for n in graph.calls if "digamma" in str(n.target)}


def test_a_known_integer_without_dimensions():
    def fn(x: Tensor) -> Tensor:
        return x.sum() / torch.ones((), dtype=torch.int64).expand(4).sum()

    assert "aten.div" not in refusals(fn, torch.rand(4))
