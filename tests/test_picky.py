"""What the user keeps in eager, and what happens to graphs that fall into fragments."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import dynamo_backends
from dynamo_backends import GraphReport, OptionError
from dynamo_backends.pipeline.program_builder import DRAWN_BY_TORCH, FRAGMENTS, KEPT_BY_OPTION
from tests.checking import assert_same, check


def attention(q: Tensor, k: Tensor) -> Tensor:
    weights = torch.softmax(q @ k.transpose(-1, -2) * 0.5, -1)
    return (weights @ k).sin() + 1


def fragments(n: int) -> Callable[[Tensor], Tensor]:
    """A function that falls into `n` blocks of 4 operators when erf is kept in eager."""

    def fn(x: Tensor) -> Tensor:
        for _ in range(n):
            x = torch.erf(((x * 2 + 1) * 0.5).sin())
        return x

    return fn


def report_of(fn: Callable[..., Any], *inputs: Tensor, **options: Any) -> GraphReport:
    (report,) = check(fn, *inputs, ops_in_eager=None, **options)
    return report


@pytest.mark.parametrize(
    "name",
    ["softmax", "aten.softmax", "aten.softmax.int", "aten._softmax", "aten._softmax.default"],
)
def test_a_named_operator_stays_in_eager(name: str):
    report = report_of(attention, torch.randn(3, 4), torch.randn(5, 4), keep_in_eager=(name,))
    (fallback,) = report.fallbacks
    assert (fallback.op, fallback.reason) == ("aten._softmax.default", KEPT_BY_OPTION)
    assert fallback.by_design
    assert [part.runs_on for part in report.parts] == ["openxla", "eager", "openxla"]


def test_a_composite_operator_is_known_by_the_function_that_was_called():
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x.sin() * 2 + 1, w).cos() * 3 - x.mm(w)

    report = report_of(fn, torch.randn(3, 3), torch.randn(3, 3), keep_in_eager=("aten.linear",))
    kept = {f.op for f in report.fallbacks if f.reason == KEPT_BY_OPTION}
    assert "aten.mm.default" in kept
    on_backend = [p.operators for p in report.parts if p.runs_on == "openxla"]
    assert sum(p.get("aten.mm.default", 0) for p in on_backend) == 1, "x.mm(w) is no linear"


def test_what_the_user_keeps_in_eager_is_no_refused_fallback():
    options = {"keep_in_eager": ("softmax",), "fallback": "error"}
    fn = lambda x: torch.softmax(x + 1, -1).sin()  # noqa: E731
    report = report_of(fn, torch.randn(3, 4), **options)
    assert [part.runs_on for part in report.parts] == ["openxla", "eager", "openxla"]
    assert report.ops_on_backend == 2, "no block is too small"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            ("sofmax",),
            r"names an operator that does not exist, 'sofmax'\. Did you mean 'softmax'\?",
        ),
        (("aten.softmax.in",), r"'aten\.softmax\.in'\. Did you mean 'aten\.softmax\.int'\?"),
        (["softmax"], r"'keep_in_eager' of openxla must be a tuple of str, not \['softmax'\]"),
        (("softmax", 3), r"must be a tuple of str, not \('softmax', 3\)"),
        ("softmax", r"must be a tuple of str, not 'softmax' \(str\)"),
    ],
)
def test_what_is_no_operator_is_refused(value: Any, text: str):
    with pytest.raises(OptionError, match=text):
        dynamo_backends.get_backend("openxla").Options.parse({"keep_in_eager": value}, "openxla")


def test_a_graph_in_many_tiny_blocks_is_reverted_to_eager(caplog: pytest.LogCaptureFixture):
    report = report_of(fragments(5), torch.randn(6), keep_in_eager=("erf",))
    assert report.reverted.startswith("5 blocks of 4 operators on average")
    assert report.reverted.endswith("the graph runs in eager instead")
    assert (report.blocks, report.executables, report.ops_on_backend) == (0, 0, 0)
    assert report.ops_in_eager == 25
    assert {f.reason for f in report.fallbacks} == {KEPT_BY_OPTION, FRAGMENTS}
    assert "openxla: one inference graph was reverted: 5 blocks" in caplog.text


def test_the_blocks_can_be_kept():
    report = report_of(fragments(5), torch.randn(6), keep_in_eager=("erf",), fragmented="keep")
    assert (report.reverted, report.blocks, report.ops_on_backend) == ("", 5, 20)


@pytest.mark.parametrize(
    ("fn", "x"),
    [
        pytest.param(fragments(3), torch.randn(6), id="few blocks"),
        pytest.param(fragments(5), torch.randn(400, 400), id="large tensors"),
        pytest.param(
            lambda x: fragments(1)(fragments(1)(fragments(1)(fragments(1)(x) @ x) @ x) @ x) @ x,
            torch.randn(4, 4),
            id="matrix products",
        ),
    ],
)
def test_blocks_that_are_worth_it_are_kept(fn: Callable[..., Any], x: Tensor):
    report = report_of(fn, x, keep_in_eager=("erf",))
    assert report.reverted == ""
    assert report.blocks >= 3


def test_each_shape_is_judged_by_itself():
    compiler = dynamo_backends.compiler("openxla", keep_in_eager=("erf",), bucket_growth=1)
    fn = fragments(4)
    compiled = torch.compile(fn, backend=compiler, dynamic=True)
    with dynamo_backends.record() as reports:
        for n, blocks in ((4, 0), (500, 4), (5, 0)):
            x = torch.randn(n, n)
            torch.testing.assert_close(compiled(x), fn(x), rtol=1e-5, atol=1e-6)
            assert reports[0].blocks == blocks
            assert bool(reports[0].reverted) == (blocks == 0)
    made = [c.executables for c in reports[0].compilations]
    assert [n > 0 for n in made] == [False, True, False]
    assert made[1] < 4, "equal blocks share code"


def test_a_graph_in_many_tiny_blocks_is_reverted_to_inductor():
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = fragments(4)(x)
        return y.t() * 2, F.dropout(y, 0.5, True)

    compiler = dynamo_backends.compiler(
        "openxla", keep_in_eager=("erf",), fragmented="inductor", min_block_size=1
    )
    compiled = torch.compile(fn, backend=compiler)
    x = torch.randn(3, 4, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    with dynamo_backends.record() as reports:
        assert_same(trained(fn, x), trained(compiled, x), trained(fn, wide))
    forward = reports[0]
    assert forward.reverted.endswith("the graph runs in Inductor instead")
    assert forward.ops_on_backend == 0
    assert forward.ops_on_inductor >= 17
    assert {part.runs_on for part in forward.parts} == {"inductor", "eager"}
    assert {f.reason for f in forward.fallbacks} == {KEPT_BY_OPTION, DRAWN_BY_TORCH}
    assert not any(r.runtime_fallbacks for r in reports)


def trained(fn: Callable[..., Any], x: Tensor) -> tuple[Tensor, ...]:
    """Results and a gradient, with the same random numbers each time."""
    torch.manual_seed(5)
    results = fn(x)
    weights = [torch.linspace(-1, 2, r.numel(), dtype=x.dtype).view_as(r) for r in results]
    return (*results, *torch.autograd.grad(results, x, weights))
