"""Gradients through compiled graphs: saved tensors, options, failures, what is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends import FallbackRefusedError, VerificationError
from dynamo_backends.pipeline import background
from dynamo_backends.xla.lowering import registry
from tests.checking import assert_same
from tests.training.helpers import agree, gradients, recurrent, squares

TANH_BACKWARD = torch.ops.aten.tanh_backward.default
MASK_BACKWARD = torch.ops.aten.gelu_backward.default


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4), nn.Tanh())


def saved_tensors(result: Tensor) -> list[Tensor]:
    """What the compiled forward has saved for the backward."""
    node: Any = result.grad_fn
    while "CompiledFunction" not in type(node).__name__:
        node = node.next_functions[0][0]
    return list(node.saved_tensors)


def test_forward_and_backward_are_one_executable_each():
    reports = agree(net(), torch.randn(5, 6, requires_grad=True))
    assert [(r.kind, r.blocks, r.executables) for r in reports] == [
        ("forward", 1, 1),
        ("backward", 1, 1),
    ]


def test_large_saved_tensors_are_handed_over_without_copies(monkeypatch: pytest.MonkeyPatch):
    from dynamo_backends.xla import _jaxlib

    read: set[int] = set()
    import_dlpack = _jaxlib.import_dlpack

    def watched(*args: Any) -> Any:
        buffer = import_dlpack(*args)
        read.add(buffer.unsafe_buffer_pointer())
        return buffer

    monkeypatch.setattr(_jaxlib, "import_dlpack", watched)
    module = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 128))
    compiled = torch.compile(module, backend="openxla")
    result = compiled(torch.randn(512, 128, requires_grad=True))
    saved = {t.data_ptr() for t in saved_tensors(result) if t.numel() >= 2**15}
    read.clear()
    result.sum().backward()
    assert len(saved) >= 4
    assert saved <= read


def test_the_min_cut_partitioner_saves_less():
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.last((x.sin() * x.cos()).exp() * x.tanh())

    x = torch.randn(4, 8)
    saved = {}
    for name in ("default", "min_cut"):
        module = Chain()
        agree(module, x, partitioner=name)
        compiler = dynamo_backends.compiler("openxla", partitioner=name)
        saved[name] = len(saved_tensors(torch.compile(module, backend=compiler)(x)))
    assert saved["min_cut"] < saved["default"]


@pytest.mark.parametrize("partitioner", ["default", "min_cut"])
def test_the_backward_does_not_draw_what_the_forward_has_drawn(partitioner: str):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            both = torch.stack([(x @ self.weight).cos(), x])
            return nn.functional.dropout(both, 0.5) * both

    forward, backward = agree(Scaled(), torch.randn(8, 4), partitioner=partitioner)
    assert [f.op for f in forward.fallbacks] == ["draw"]
    assert backward.fallbacks == ()


@pytest.fixture
def wrong_tanh_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lowering of tanh's gradient that is one thousandth off."""
    __import__("dynamo_backends.xla.lowering")
    row = registry.lookup(TANH_BACKWARD)
    assert row is not None
    wrong = replace(row, fn=lambda grad, y: row.fn(grad, y) * 1.001)
    monkeypatch.setitem(registry._TABLE, TANH_BACKWARD, wrong)


@pytest.mark.plants_errors
@pytest.mark.usefixtures("wrong_tanh_gradient")
def test_verification_covers_the_backward(caplog: pytest.LogCaptureFixture):
    module, x = net(), torch.randn(5, 6)
    theirs = gradients(module, module, x)
    unseen = dynamo_backends.compiler("openxla", verify="off", cache=False)
    plain = torch.compile(module, backend=unseen)
    assert not torch.allclose(gradients(module, plain, x)["0.weight"], theirs["0.weight"])
    torch._dynamo.reset()
    compiler = dynamo_backends.compiler("openxla", cache=False)
    with dynamo_backends.record() as reports:
        compiled = torch.compile(module, backend=compiler)
        for _ in range(2):
            ours = gradients(module, compiled, x)
            torch.testing.assert_close(ours, theirs)
    assert "openxla computed a wrong result" in caplog.text
    assert [len(r.runtime_fallbacks) for r in reports] == [0, 1]
    torch._dynamo.reset()
    refusing = dynamo_backends.compiler("openxla", fallback="error", cache=False)
    loss = squares(torch.compile(module, backend=refusing), x)
    with pytest.raises(VerificationError, match="output 0 differs from eager by up to"):
        loss.backward()


def test_what_has_no_lowering_in_the_backward_runs_in_eager(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no")

    row = registry.lookup(MASK_BACKWARD)
    assert row is not None
    monkeypatch.setitem(registry._TABLE, MASK_BACKWARD, replace(row, fn=fail))
    module, x = net(), torch.randn(5, 6)
    forward, backward = agree(module, x, ops_in_eager=1, cache=False)
    assert forward.fallbacks == ()
    assert backward.fallbacks[0].reason == "RuntimeError: no"
    torch._dynamo.reset()
    refusing = dynamo_backends.compiler("openxla", fallback="error", cache=False)
    loss = squares(torch.compile(module, backend=refusing), x)
    with pytest.raises(FallbackRefusedError, match=r"cannot run aten.gelu_backward.default.*: no"):
        loss.backward()


def test_a_graph_can_be_kept_for_a_second_backward():
    module, x = net(), torch.randn(5, 6)
    compiled = torch.compile(module, backend="openxla")
    expected = gradients(module, module, x)["0.weight"]
    for kept in (False, True, False):
        module.zero_grad()
        loss = squares(compiled, x)
        loss.backward(retain_graph=kept)
        if kept:
            loss.backward()
        torch.testing.assert_close(module[0].weight.grad, expected * (2 if kept else 1))
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSTM(4, 6, 2, bias=False, dropout=0.5, bidirectional=True, batch_first=True),
        lambda: nn.GRU(4, 6, 3, dropout=0.5),
    ],
    ids=["lstm", "gru"],
)
def test_recurrent_networks_apply_their_dropout(make: Any):
    module = make()
    with recurrent():
        forward, _ = agree(module, torch.randn(2, 2, 4))
        assert [f.op for f in forward.fallbacks] == ["draw"]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_states_of_recurrent_networks_in_float64(kind: type[nn.RNNBase]):
    module, x = kind(4, 6, 2).double(), torch.randn(3, 2, 4, dtype=torch.float64)
    with recurrent(), torch.no_grad():
        torch.testing.assert_close(torch.compile(module, backend="openxla")(x), module(x))


@pytest.mark.parametrize("backend", ["onnxrt", "inductor_freezing", "openxla"])
@pytest.mark.parametrize("bias", [True, False])
def test_lstm_layers_of_onednn(backend: str, bias: bool):
    with recurrent():
        x = torch.randn(5, 3, 4)
        agree(
            nn.LSTM(4, 6, 2, bias=bias, bidirectional=True), x, ops_in_eager=None, backend=backend
        )


def test_one_lstm_layer_is_one_loop_in_both_directions():
    with recurrent():
        reports = agree(nn.LSTM(4, 6), torch.randn(20, 3, 4))
    assert all(r.ops_on_backend < 100 for r in reports), "it was unrolled over time"


def test_some_results_without_gradients():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return self.a(x), self.b(x), x.argmax(1)

    def only_first(function: Any, x: Tensor) -> Tensor:
        return function(x)[0].sum()

    module, x = Two(), torch.randn(5, 4)
    compiled = torch.compile(module, backend="openxla")
    ours = gradients(module, compiled, x, only_first)
    theirs = gradients(module, module, x, only_first)
    torch.testing.assert_close(ours["a.weight"], theirs["a.weight"])
    assert theirs["b.weight"] is None
    assert ours["b.weight"] is None or not ours["b.weight"].any()


@pytest.mark.parametrize("kind", ["expanded", "transposed", "channels_last"])
def test_incoming_gradients_of_any_layout(kind: str):
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh())

    def weighted(function: Any, x: Tensor) -> Tensor:
        y = function(x)
        weights = torch.linspace(0, 1, y.numel(), dtype=y.dtype).view(y.shape)
        if kind == "expanded":
            return y.sum()
        if kind == "transposed":
            return (y.transpose(2, 3) * weights).sum()
        return (y.contiguous(memory_format=torch.channels_last) * weights).sum()

    agree(module, torch.randn(2, 3, 6, 6), weighted)


def test_an_input_that_the_graph_changes():
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            self.seen.add_(y.detach().mean(0))
            return y * self.seen

    agree(Centred(), torch.randn(5, 4))


def test_a_batch_of_any_size(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(background, "submit_compilation", lambda mark, job, owner: None)
    module = net()
    compiled = torch.compile(module, backend="openxla", dynamic=True)
    with dynamo_backends.record() as reports:
        for batch in (2, 3, 7, 3):
            x = torch.randn(batch, 6)
            ours, theirs = gradients(module, compiled, x), gradients(module, module, x)
            assert_same(theirs, ours, theirs)
    assert [(r.kind, r.executables) for r in reports] == [("forward", 3), ("backward", 3)]


class Solve(nn.Module):
    """Its gradient reads the factors of a matrix, or of its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4) * 3 + torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.solve_ex(self.weight, x)[0]


@pytest.mark.parametrize("make", [Solve, nn.Hardsigmoid, nn.Hardswish], ids=lambda m: m.__name__)
def test_gradients_follow_what_eager_keeps(make: Any):
    module = make().double()
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(module, backend="openxla")
    ours, theirs = gradients(module, compiled, x), gradients(module, module, x)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_saved_weights_are_the_weights():
    module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    result = torch.compile(module, backend="openxla")(torch.randn(5, 8))
    assert module[2].weight.data_ptr() in [t.data_ptr() for t in saved_tensors(result)]
    assert len(saved_tensors(result)) == 3, "the input, the weight and the activation"


def test_a_size_that_depends_on_data_reaches_the_backward():
    def numbers(x: Tensor) -> Tensor:
        return torch.combinations(x, 1).exp()

    ours, theirs = (torch.arange(1.0, 6.0).requires_grad_() for _ in range(2))
    compiled = torch.compile(numbers, backend="openxla", fullgraph=True)
    (gradient,) = torch.autograd.grad(compiled(ours).sum(), ours)
    (expected,) = torch.autograd.grad(numbers(theirs).sum(), theirs)
    torch.testing.assert_close(gradient, expected)
