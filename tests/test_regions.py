"""Regions that are marked or repeated: nothing of them runs in eager, and equal ones are shared."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends import GraphReport, OptionError
from dynamo_backends._torch_private import calls_graphs, inline_regions
from dynamo_backends.aot import autograd, equal_layers, traces
from dynamo_backends.bench.suites import call, find_cases, suite
from dynamo_backends.graph.fingerprint import fingerprint
from dynamo_backends.graph.passes import PASSES
from tests.aot.step_checks import assert_as_accurate_as_eager
from tests.backend_checks import usable
from tests.checking import assert_same, widen
from tests.training.helpers import agree as gradients_agree

LAYERS = 4

BACKENDS = [
    "openxla", "onnxrt", "ov", "tvm", "ts_trace", "ofi", "static_runtime", "onednn_graph",
    "inductor_freezing", "autotune",
]  # fmt: skip


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v)
        x = x + self.down(F.gelu(self.up(x)))
        return F.dropout(x, self.dropout, self.training)


class Stack(nn.Module):
    """Equal blocks between an embedding and a head."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.layers = nn.ModuleList(block() for _ in range(LAYERS))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class MarkedBlock(Block):
    """A block with a mark, which deep copies and new dtypes keep."""

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def assert_right(
    compiled: Callable[..., Any], model: nn.Module, *inputs: Tensor
) -> list[GraphReport]:
    """Compares two calls with eager; nothing that was captured may run there."""
    precise = copy.deepcopy(model).double()
    with dynamo_backends.record() as reports:
        for _ in range(2):
            assert_same(model(*inputs), compiled(*inputs), precise(*map(widen, inputs)))
    assert reports, "nothing was compiled"
    for report in reports:
        assert report.ops_in_eager == 0, report.fallbacks
        assert not report.reverted
        assert not report.runtime_fallbacks
    return reports


def model_and_input() -> tuple[nn.Module, Tensor]:
    return Stack(MarkedBlock).eval(), torch.randn(2, 5, 8)


def unmarked() -> tuple[nn.Module, Tensor]:
    return Stack().eval(), torch.randn(2, 5, 8)


@pytest.mark.parametrize("backend", BACKENDS)
def test_marked_layers_run_on_every_backend(backend: str):
    model, x = model_and_input()
    with torch.no_grad():
        assert_right(torch.compile(model, backend=usable(backend)), model, x)


class MarkedPerceptron(nn.Module):
    """A layer without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


@torch.no_grad()
@pytest.mark.parametrize("backend", ["iree", "ltc", "ltc_trace"])
def test_marked_layers_without_attention(backend: str):
    """Lazy tensors leave a part of attention to eager, and IREE computes four layers wrong."""
    model = Stack(MarkedPerceptron).eval()
    assert_right(torch.compile(model, backend=usable(backend)), model, torch.randn(2, 5, 8))


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Gets an entry for each graph that AOT Autograd traces: whether that calls regions."""
    found: list[bool] = []
    original = autograd.private.aot_autograd

    def noted(**compilers: Any) -> Callable[..., Any]:
        trace = original(**compilers)

        def run(gm: Any, inputs: Any) -> Any:
            found.append(calls_graphs(gm.graph))
            return trace(gm, inputs)

        return run

    monkeypatch.setattr(autograd.private, "aot_autograd", noted)
    return found


@torch.no_grad()
def test_aot_autograd_traces_a_region_once(traced: list[bool]):
    model, x = model_and_input()
    (report,) = assert_right(torch.compile(model, backend="openxla"), model, x)
    assert traced == [True]
    assert (report.blocks, report.executables) == (1, 1)


@torch.no_grad()
def test_a_graph_with_regions_is_kept_on_disk(traced: list[bool], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(traces, "LEAST_S", 0.0)
    model, x = model_and_input()
    for _ in range(2):
        torch._dynamo.reset()
        assert_right(torch.compile(model, backend="openxla"), model, x)
    assert traced == [True]


@pytest.mark.parametrize("backend", ["openxla", "onnxrt", "ov", "inductor_freezing", "autotune"])
def test_gradients(backend: str):
    gradients_agree(Stack(MarkedBlock), torch.randn(2, 5, 8), backend=usable(backend))


@pytest.mark.parametrize("partitioner", ["default", "min_cut"])
def test_gradients_of_inputs_with_dropout_draw_as_eager(partitioner: str):
    model = Stack(lambda: MarkedBlock(dropout=0.5))
    x = torch.randn(2, 5, 8, requires_grad=True)
    gradients_agree(model, x, ops_in_eager=None, partitioner=partitioner)


@pytest.mark.parametrize("training", [True, False])
def test_buffers_that_a_region_updates(training: bool, traced: list[bool]):
    class Updating(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
            self.register_buffer("calls", torch.zeros(()))

        @torch.compiler.nested_compile_region
        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            return self.norm(self.inner(x)).relu()

    model, x = Stack(Updating).train(training), torch.randn(6, 8)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        compiled = torch.compile(model, backend="openxla")
        with dynamo_backends.record() as reports:
            for _ in range(3):
                torch.testing.assert_close(compiled(x), twin(x))
    for ours, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert [r.ops_in_eager for r in reports] == [0]
    assert traced == [True, False]
    if training:
        gradients_agree(model, x)


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [True, None])
def test_symbolic_sizes(dynamic: bool | None):
    model, _ = model_and_input()
    compiled = torch.compile(model, backend="openxla", dynamic=dynamic)
    for batch, length in ((2, 5), (3, 7), (4, 6), (5, 9)):
        assert_right_or_compiled(compiled, model, torch.randn(batch, length, 8))


def assert_right_or_compiled(compiled: Any, model: nn.Module, *inputs: Tensor) -> None:
    """As `assert_right`, where an earlier call may have compiled everything."""
    with dynamo_backends.record() as reports:
        torch.testing.assert_close(compiled(*inputs), model(*inputs))
    assert [r.ops_in_eager for r in reports if r.ops_in_eager] == []


@torch.compiler.nested_compile_region
def _inner(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    y = x * scale
    return y.sin(), y


@torch.compiler.nested_compile_region
def _outer(x: Tensor, scale: Tensor) -> Tensor:
    first, second = _inner(x, scale)
    third, _ = _inner(second, first)
    return first + third


def _nested(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return _outer(x, y).cos(), _outer(y, x)


@torch.compiler.nested_compile_region
def _constants(x: Tensor) -> Tensor:
    return x * torch.tensor([1.0, 2.0, 3.0]) + torch.arange(3)


def _with_constants(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return _constants(_constants(x)), _constants(y)


@torch.compiler.nested_compile_region
def _draws(x: Tensor) -> Tensor:
    torch.rand(7)  # nobody reads it; what comes later depends on it
    return x + torch.rand_like(x)


def _drawing(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return _draws(_draws(x)), _draws(y)


@torch.compiler.nested_compile_region
def _half(x: Tensor) -> Tensor:
    return (x @ x).float()


def _with_autocast(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    with torch.autocast("cpu"):
        return _half(x), _half(y)


@torch.compiler.nested_compile_region
def _slices(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:2].clone(), x[1:] * 2


def _viewing(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    first, second = _slices(x)
    third, fourth = _slices(y)
    return first.t(), second[0], third, fourth


FUNCTIONS = [_nested, _with_constants, _drawing, _with_autocast, _viewing]


def results_and_gradients(function: Any, x: Tensor, y: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    results = function(x, y)
    if not x.requires_grad:
        return list(results)
    return [*results, *torch.autograd.grad([r.sum() for r in results], (x, y))]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_regions_in_functions(function: Callable[..., Any], grad: bool):
    x, y = (torch.randn(3, 3, requires_grad=grad) for _ in range(2))
    compiled = torch.compile(function, backend="openxla")
    with dynamo_backends.record() as reports:
        for _ in range(2):
            expected = results_and_gradients(function, x, y)
            found = results_and_gradients(compiled, x, y)
            if function is _drawing:  # other numbers are drawn in float64
                torch.testing.assert_close(found, expected)
            else:
                precise = results_and_gradients(function, widen(x), widen(y))
                assert_same(expected, found, precise)
    in_eager = {f.op for r in reports for f in r.fallbacks}
    assert reports
    assert in_eager <= {"draw", "aten.rand.default"}  # random numbers, which torch draws


@pytest.mark.parametrize("around", [True, False])
def test_checkpoints_around_and_inside_of_regions(around: bool):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Block):
        def forward(self, x: Tensor) -> Tensor:
            if around:
                return checkpoint(self.marked, x, use_reentrant=False)
            return self.unmarked(x)

        @torch.compiler.nested_compile_region
        def marked(self, x: Tensor) -> Tensor:
            return super().forward(x)

        @torch.compiler.nested_compile_region
        def unmarked(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    gradients_agree(Stack(Checkpointed), torch.randn(2, 5, 8))


def test_recurrent_networks_are_no_regions(traced: list[bool]):
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(16, 16, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(self.lstm(x.sin().cos())[0].exp() + x, (16,)).relu().tanh()

    model = Stack(Recurrent).eval()
    with torch.no_grad(), torch._dynamo.config.patch(allow_rnn=True):
        assert_right(torch.compile(model, backend="openxla"), model, torch.randn(2, 5, 8))
    assert traced == [False]


@pytest.mark.parametrize("backend", ["openxla", "onnxrt", "inductor_freezing"])
def test_steps(backend: str):
    batches = [(torch.randn(2, 5, 8),) for _ in range(4)]
    assert_as_accurate_as_eager(
        lambda: Stack(MarkedBlock), torch.optim.AdamW, batches, usable(backend), fallback="error"
    )


@torch.no_grad()
@pytest.mark.parametrize("backend", ["openxla", "onnxrt", "ov"])
def test_packages(backend: str, tmp_path: Path):
    model, x = model_and_input()
    path = tmp_path / "model.dbp"
    batch = torch.export.Dim("batch", min=2, max=16)
    shapes = {"x": {0: batch}}
    dynamo_backends.save(model, path, (x,), backend=usable(backend), dynamic_shapes=shapes)
    loaded = dynamo_backends.load(path)
    assert_same(model(x), loaded(x), copy.deepcopy(model).double()(x.double()))
    assert [r.ops_in_eager for r in loaded.reports] == [0]


def test_stages_and_explain_show_the_calls_inside_of_regions():
    from dynamo_backends.capture.stage_printing import normal_form

    model, x = model_and_input()
    with torch.no_grad():
        stages = normal_form(model, x)
        explained = dynamo_backends.explain(model, x, backend="openxla")
    assert not any("invoke_subgraph" in stage.text for stage in stages)
    (graph,) = explained.graphs
    assert graph.operators["gelu"] == LAYERS
    assert "invoke_subgraph" not in graph.operators


def test_a_graph_without_regions_is_itself():
    traced = torch.fx.symbolic_trace(nn.Linear(3, 3))
    assert inline_regions(traced) is traced


# Equal layers without marks.


@torch.no_grad()
def test_equal_layers_are_traced_once(traced: list[bool]):
    model, x = unmarked()
    assert_right(torch.compile(model, backend="openxla"), model, x)
    assert traced == [True]


def test_equal_layers_in_inference_mode(traced: list[bool]):
    model, x = unmarked()
    compiled = torch.compile(model, backend="openxla")
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), model(x))
    assert traced == [True]


def setting_modes(x: Tensor, weights: list[Tensor]) -> Tensor:
    """A layer ends in another mode than it begins in."""
    for number, weight in enumerate(weights):
        torch.set_grad_enabled(number % 2 == 0)
        x = (torch.relu(x @ weight) + x).sin().cos().exp().tanh().abs()
    torch.set_grad_enabled(False)
    return x


def functional_graphs(function: Any, *inputs: Any, **named: Any) -> list[str]:
    """What identifies the functional graphs of a function, in canonical form."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=dynamo_backends.compiler("openxla", verify="off"))
    with torch.no_grad(), dynamo_backends.record() as reports:
        compiled(*inputs, **named)
    graphs = [report.executable._graph.copy() for report in reports]
    for graph in graphs:
        PASSES(graph)
    return list(map(fingerprint, graphs))


def unlike(x: Tensor, weights: list[Tensor]) -> Tensor:
    """Layers of which the first reads one value twice where the others read two."""
    y = x
    for weight in weights:
        y = torch.relu(x @ weight) + torch.sigmoid(y @ weight).cos() * 2
        x, y = y.sin().exp() + x, (x.tanh() - y).abs()
    return x + y


def returning_all(x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """Results of layers are read after the last one."""
    found = []
    for weight in weights:
        x = (torch.relu(x @ weight) + x).sin().cos().exp().tanh().abs()
        found.append(x * 2)
    return found


def of_views(x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """Each layer returns a view of what it is given."""
    found = []
    for weight in weights:
        found.append(x.T)
        x = (torch.relu(x @ weight) + x).sin().cos().exp().tanh().abs()
    return found


def in_place(x: Tensor, weights: list[Tensor]) -> Tensor:
    """Each layer writes to what the one before has returned."""
    x = x + 1
    for weight in weights:
        x.add_(torch.relu(x @ weight).sin().cos().exp().tanh().abs().neg())
    return x


def of_constants(x: Tensor, weights: list[Tensor]) -> Tensor:
    """Layers make tensors, and some have another number than the others."""
    for number, weight in enumerate(weights):
        x = torch.tanh(x @ weight / 10 + torch.arange(8.0) * torch.tensor(0.5))
        x = F.layer_norm(x.sin().cos().exp(), (8,), eps=1e-5) * (0.2 if number < 4 else 0.3)
    return x


LAYERED = {
    setting_modes: False,
    unlike: None,
    returning_all: True,
    of_views: None,
    in_place: None,
    of_constants: True,
}


@pytest.mark.parametrize("function", LAYERED)
def test_the_functional_graph_is_that_without_regions(
    function: Any, traced: list[bool], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(traces, "LEAST_S", 100.0)
    x, weights = torch.randn(8, 8), [torch.randn(8, 8) / 4 for _ in range(6)]
    with torch.no_grad():
        found = torch.compile(function, backend="openxla")(x, weights)
        torch.testing.assert_close(found, function(x, weights), rtol=1e-4, atol=1e-5)
    by_region = functional_graphs(function, x, weights)
    assert LAYERED[function] in (None, traced[-1])
    monkeypatch.setattr(autograd, "mark_equal_layers", lambda captured: captured)
    assert (functional_graphs(function, x, weights) == by_region) is (function is not of_constants)
    assert traced[-1] is False


@pytest.mark.parametrize("marked", [True, False])
def test_products_that_torch_folds_for_gradients_are_no_regions(marked: bool, traced: list[bool]):
    class Transposing(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.up(x.transpose(0, 1)).sum()

    class Marked(Transposing):
        @torch.compiler.nested_compile_region
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    model = Stack(Marked if marked else Transposing).eval()
    with torch.no_grad():
        assert_right(torch.compile(model, backend="openxla"), model, torch.randn(2, 5, 8))
        assert traced == [False]
        torch._dynamo.reset()
        torch.compile(model.requires_grad_(False), backend="openxla")(torch.randn(2, 5, 8))
    assert traced == [False, True]


@pytest.mark.parametrize("name", ["llama", "gpt2", "distilbert"])
def test_the_functional_graph_of_a_model_is_that_without_regions(
    name: str, traced: list[bool], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(traces, "LEAST_S", 100.0)
    monkeypatch.setattr(equal_layers, "LEAST_LAYERS", 2)
    (case,) = find_cases(suite("transformers", "test"), [name])
    model, inputs = case.make().eval(), case.inputs()
    call_it = lambda batch: call(model, batch)  # noqa: E731
    by_region = functional_graphs(call_it, inputs)
    monkeypatch.setattr(autograd, "mark_equal_layers", lambda captured: captured)
    assert functional_graphs(call_it, inputs) == by_region
    assert traced == [True, False]


# Repeated layers.


@torch.no_grad()
@pytest.mark.parametrize("backend", ["openxla", "onnxrt", "ov", "inductor_freezing"])
def test_one_graph_serves_equal_layers(backend: str):
    model, x = unmarked()
    precise, expected = copy.deepcopy(model).double()(x.double()), model(x)
    assert dynamo_backends.compile_regions(model, backend=usable(backend)) is model
    with dynamo_backends.record() as reports:
        for _ in range(2):
            assert_same(expected, model(x), precise)
    assert [(r.executables, r.ops_in_eager) for r in reports] == [(1, 0)]
    assert [*model.state_dict()] == [*Stack().state_dict()]


@torch.no_grad()
def test_the_weights_of_each_layer_stay_prepared():
    model, x = unmarked()
    model.layers.extend(Block() for _ in range(12))
    dynamo_backends.compile_regions(model.eval(), backend="openxla")
    with dynamo_backends.record() as reports:
        for _ in range(2):
            model(x)
        (report,) = reports
        before = report.rebinds
        for _ in range(3):
            model(x)
    assert report.rebinds == before
    model.layers[9].up.weight.add_(1)
    torch.testing.assert_close(model(x), copy.deepcopy(model)(x))


def test_gradients_through_compiled_layers():
    model, x = Stack(), torch.randn(2, 5, 8)
    twin = copy.deepcopy(model)
    dynamo_backends.compile_regions(model, backend="openxla")
    for each in (model, twin):
        each(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def compiled_layers(model: nn.Module, **arguments: Any) -> list[str]:
    dynamo_backends.compile_regions(model, **arguments)
    return [name for name, module in model.named_modules() if module._compiled_call_impl]


def test_which_layers_are_compiled():
    def block(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, width), nn.ReLU())

    stages = nn.ModuleList(nn.ModuleList(block(width) for _ in range(2)) for width in (3, 4))
    model = nn.ModuleDict({"stages": stages, "one": nn.ModuleList([block(5)])})
    names = ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]
    assert compiled_layers(model) == names
    stack = Stack()
    assert compiled_layers(stack) == [f"layers.{i}" for i in range(LAYERS)]
    stack = Stack()
    stack._repeated_blocks = ["LayerNorm"]
    assert compiled_layers(stack) == [f"layers.{i}.norm" for i in range(LAYERS)]
    stack = Stack()
    assert len(compiled_layers(stack, classes="Block")) == LAYERS


def test_without_layers_it_says_what_there_is():
    with pytest.raises(OptionError, match=r"Linear has no equal layers in a ModuleList"):
        dynamo_backends.compile_regions(nn.Linear(3, 3))
    with pytest.raises(OptionError, match=r"classes names \['Layer'\]; Stack has \['Block', "):
        dynamo_backends.compile_regions(Stack(), classes=["Layer", "Block"])
    with pytest.raises(OptionError, match="no option"):
        dynamo_backends.compile_regions(Stack(), options={"fast": True})
