"""Functional graphs on disk: found by all that tracing depends on, and by nothing else."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn

import dynamo_backends
from dynamo_backends._torch_private import meets_benchmark_accuracy
from dynamo_backends._torch_private.graph_serialization import (
    UnserializableError,
    pack_static,
    unpack_static,
)
from dynamo_backends.aot import traces
from dynamo_backends.bench.suites import suite
from dynamo_backends.bench.suites.case import call
from dynamo_backends.pipeline import captured
from tests.backend_checks import usable

BACKENDS = ["openxla", "onnxrt", "ov", "inductor_freezing"]


class Net(nn.Module):
    """Convolution, batch norm, attention, constants and views."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm(self.conv(x))).flatten(2).transpose(1, 2)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(x.mean(1)) * torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])


@pytest.fixture(autouse=True)
def _keeps_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "LEAST_S", 0.0)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Gets an entry for each graph that AOT Autograd traces."""
    found: list[str] = []
    original = traces.private.aot_autograd

    def noted(**compilers: Any) -> Callable[..., Any]:
        found.append("traced")
        return original(**compilers)

    monkeypatch.setattr(traces.private, "aot_autograd", noted)
    return found


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Gets the key of each graph that is compiled."""
    found: list[str | None] = []

    def noted(*arguments: Any) -> str | None:
        found.append(traces.key_of(*arguments))
        return found[-1]

    monkeypatch.setattr(captured, "key_of", noted)
    return found


def anew(function: Any, *inputs: Any, backend: str = "openxla", **options: Any) -> Any:
    """What a compiled function returns, compiled as in another process."""
    torch._dynamo.reset()
    compiler = dynamo_backends.compiler(backend, verify="off", **options)
    return torch.compile(function, backend=compiler)(*inputs)


@torch.no_grad()
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_is_traced_once(backend: str, traced: list[str]):
    model, x = Net().eval(), torch.randn(2, 3, 8, 8)
    usable(backend)
    expected, precise = model(x), Net.forward(model.double(), x.double())
    model.float()
    with dynamo_backends.record() as reports:
        for _ in range(3):
            assert meets_benchmark_accuracy(expected, anew(model, x, backend=backend), precise)
    assert traced == ["traced"]
    first, second, third = reports
    assert first.ops_on_backend == second.ops_on_backend == third.ops_on_backend > 0
    assert "loading from disk" in second.stage_seconds


@torch.no_grad()
def test_a_model_in_another_process_is_not_traced(tmp_path: Path):
    usable("onnxrt")
    program = tmp_path / "program.py"
    program.write_text(
        "import torch\n"
        "from torch import nn\n"
        "from dynamo_backends.aot import traces\n"
        "traces.LEAST_S = 0.0\n"
        "torch.manual_seed(0)\n"
        "model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()\n"
        "x = torch.randn(2, 5, 16)\n"
        "with torch.no_grad():\n"
        "    found = torch.compile(model, backend='onnxrt')(x)\n"
        "    torch.testing.assert_close(found, model(x))\n"
        "print(dict(torch._dynamo.utils.counters['aot_autograd']))\n"
    )
    said = [subprocess.check_output([sys.executable, program], text=True) for _ in range(2)]
    assert "'ok': 1" in said[0]
    assert said[1].strip().endswith("{}")


def one_more(x: Tensor) -> Tensor:
    return (x + 1).sin()


@torch.no_grad()
def test_weights_are_no_part_of_a_trace(traced: list[str]):
    """Equal models share one, and each computes with its own weights."""
    models, x = [nn.Linear(4, 4) for _ in range(2)], torch.randn(3, 4)

    def run(model: nn.Module) -> Tensor:
        return torch.relu(model(x))

    for model in models:
        torch.testing.assert_close(anew(lambda m=model: run(m)), run(model))
    assert traced == ["traced"]


def _keys_of(keys: list[str | None], function: Any, *inputs: Any, **options: Any) -> str | None:
    keys.clear()
    anew(function, *inputs, **options)
    (found,) = keys
    return found


@torch.no_grad()
def test_other_inputs_have_other_keys(keys: list[str | None]):
    x = torch.randn(4, 6)
    inputs = [
        x,
        torch.randn(4, 5),
        x.double(),
        torch.randn(6, 4).T,
        torch.randn(30)[6:].view(4, 6),
        nn.Parameter(x.clone()),
        x.clone().requires_grad_(),
    ]
    found = [_keys_of(keys, one_more, given) for given in inputs]
    assert None not in found
    assert len({*found}) == len(inputs)
    assert _keys_of(keys, one_more, torch.randn(4, 6)) == found[0]


@torch.no_grad()
def test_other_calls_have_other_keys(keys: list[str | None]):
    x = torch.randn(4, 6)
    functions: list[Callable[[Tensor], Tensor]] = [
        lambda x: F.softmax(x, 0), lambda x: F.softmax(x, 1), lambda x: F.softmax(x, dim=1),
        lambda x: F.leaky_relu(x, 0.1), lambda x: F.leaky_relu(x, 0.2), lambda x: x[1:],
        lambda x: x[:, 1:], lambda x: x.to(torch.float64), lambda x: x.to(torch.bfloat16),
        lambda x: x.sum(), lambda x: x.mean(),
    ]  # fmt: skip
    found = [_keys_of(keys, function, x) for function in functions]
    assert None not in found
    assert len({*found}) == len(functions)


@torch.no_grad()
def test_settings_of_torch_are_part_of_a_key(keys: list[str | None]):
    x = torch.randn(2, 2, 4, 8)

    def attention(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)

    found = [_keys_of(keys, attention, x)]
    with torch.enable_grad():
        found.append(_keys_of(keys, attention, x))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        found.append(_keys_of(keys, attention, x))
    torch.use_deterministic_algorithms(True)
    try:
        found.append(_keys_of(keys, attention, x))
    finally:
        torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float64)
    try:
        found.append(_keys_of(keys, attention, x))
    finally:
        torch.set_default_dtype(torch.float32)
    assert None not in found
    assert len({*found}) == len(found)


@torch.no_grad()
def test_a_line_of_code_is_part_of_a_key(keys: list[str | None]):
    """`explain` and profilers name it."""
    x = torch.randn(3)
    first = _keys_of(keys, lambda x: x.sin().exp(), x)
    assert first != _keys_of(keys, lambda x: x.sin().exp(), x)


@torch.library.custom_op("test_traces::twice", mutates_args=())
def _twice(x: Tensor) -> Tensor:
    return x * 2


@_twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _branches(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


@torch.no_grad()
@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (lambda x, y: x * y, lambda: torch.randn(6).split(3)),
        (lambda x: _twice(x).sin(), lambda: (torch.randn(3),)),
        (lambda x: torch.ops.test_traces.twice(x).sin(), lambda: (torch.randn(3),)),
        (_branches, lambda: (torch.randn(3),)),
        (lambda x: x.sin().real, lambda: (torch.randn(3, dtype=torch.complex64).conj(),)),
    ],
    ids=["parts of one tensor", "operators of others", "by name", "control flow", "conjugates"],
)
def test_what_has_no_key(function: Any, inputs: Any, keys: list[str | None]):
    given = inputs()
    torch.testing.assert_close(anew(function, *given), function(*given))
    assert keys == [None]


@torch.no_grad()
def test_dynamic_shapes_are_traced(keys: list[str | None]):
    compiled = torch.compile(one_more, backend="openxla", dynamic=True)
    for size in (3, 5):
        x = torch.randn(size)
        torch.testing.assert_close(compiled(x), one_more(x))
    assert keys == [None]


def _updates(x: Tensor) -> Tensor:
    x.mul_(2)
    return x.sin()


@pytest.mark.parametrize("function", [_updates, lambda x: (x.sin(), x[1:])], ids=["update", "view"])
def test_where_aot_autograd_has_to_do_something_it_is_asked(function: Any, traced: list[str]):
    with torch.no_grad():
        for _ in range(2):
            x = torch.randn(4)
            given = x.clone()
            torch.testing.assert_close(anew(function, given), function(x))
            torch.testing.assert_close(given, x)
    assert traced == ["traced"] * 2


def test_gradients_are_traced(traced: list[str]):
    x = torch.randn(4, requires_grad=True)
    for _ in range(2):
        x.grad = None
        anew(one_more, x).sum().backward()
        torch.testing.assert_close(x.grad, (x + 1).cos())
    assert traced == ["traced"] * 2


@torch.no_grad()
def test_autocast_is_traced(traced: list[str]):
    x, weight = torch.randn(4, 4), torch.randn(4, 4)

    def multiply(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y).relu()

    plain = anew(multiply, x, weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        reduced = [anew(multiply, x, weight) for _ in range(2)]
    assert [plain.dtype, *(r.dtype for r in reduced)] == [torch.float32] + [torch.bfloat16] * 2
    assert traced == ["traced"] * 3


@torch.no_grad()
def test_draws_are_those_of_eager(traced: list[str]):
    def draw(x: Tensor) -> Tensor:
        return F.dropout(x, 0.5) + torch.rand(8)

    for _ in range(2):
        x = torch.randn(8)
        torch.manual_seed(3)
        expected = draw(x)
        torch.manual_seed(3)
        torch.testing.assert_close(anew(draw, x), expected)
    assert traced == ["traced"]


@torch.no_grad()
@pytest.mark.parametrize("options", [{"cache": False}, {"keep_in_eager": ("sin",)}])
def test_options_that_keep_nothing(options: Any, traced: list[str], tmp_path: Path):
    for _ in range(2):
        anew(one_more, torch.randn(3), **options)
    assert traced == ["traced"] * 2
    assert not (tmp_path / "cache" / traces.FOLDER).exists()


@torch.no_grad()
def test_a_damaged_entry_is_dropped(
    traced: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    x = torch.randn(3)
    anew(one_more, x)
    (entry,) = (tmp_path / "cache" / traces.FOLDER).iterdir()
    store = traces._store()
    store.put(entry.stem, {"graph": b"no graph", "static": b"[]"})
    torch.testing.assert_close(anew(one_more, x), one_more(x))
    assert "dropped an unusable trace" in caplog.text
    torch.testing.assert_close(anew(one_more, x), one_more(x))
    assert traced == ["traced"] * 2, "it was written again, and read"


@torch.no_grad()
def test_short_traces_are_not_kept(
    monkeypatch: pytest.MonkeyPatch, traced: list[str], tmp_path: Path
):
    monkeypatch.setattr(traces, "LEAST_S", 3600.0)
    for _ in range(2):
        anew(one_more, torch.randn(3))
    assert traced == ["traced"] * 2
    assert not (tmp_path / "cache" / traces.FOLDER).exists()


@torch.no_grad()
@pytest.mark.parametrize("suite_name", ["classic", "transformers"])
def test_models_have_keys(suite_name: str, keys: list[str | None]):
    cases = suite(suite_name, "test", 2)[:6]
    for case in cases:
        torch._dynamo.reset()
        compiled = torch.compile(case.make(), backend=dynamo_backends.compiler("ts_trace"))
        call(compiled, case.inputs())
    assert len({*keys} - {None}) >= len(cases)
    assert None not in keys


def functional(function: Any, *inputs: Any, dynamic: bool = False) -> fx.GraphModule:
    """What AOT Autograd makes of a function."""
    found = []

    def note(gm: fx.GraphModule, _: Any) -> Any:
        found.append(gm)
        return make_boxed_func(gm.forward)

    torch._dynamo.reset()
    backend = traces.private.aot_autograd(fw_compiler=note)
    torch.compile(function, backend=backend, dynamic=dynamic)(*inputs)
    return found[0]


def described(value: Any) -> Any:
    """A value of a node, without the tensors."""
    if isinstance(value, (tuple, list)):
        return [described(item) for item in value]
    if not isinstance(value, Tensor):
        return value
    kind = type(value).__name__, value.dtype, value.device, value.requires_grad
    return *kind, tuple(value.shape), value.stride(), value.storage_offset()


def _of_many_kinds(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    table = torch.tensor([[1.5, -2.0], [0.0, 3.0]])
    parts = x.split(2, dim=1)
    rows = parts[1].T.expand(3, -1, -1)[:, 1:]
    values, places = (x @ weight).topk(2)
    return rows * 2, values @ table, places.to(torch.float64), F.layer_norm(x, (4,))


@torch.no_grad()
def test_a_graph_is_read_as_it_was_written():
    gm = functional(_of_many_kinds, torch.randn(5, 4), nn.Parameter(torch.randn(4, 6)))
    found = unpack_static(pack_static(gm))
    assert str(found.graph) == str(gm.graph)
    assert [*dict(found.named_buffers())] == [n.target for n in gm.graph.find_nodes(op="get_attr")]
    for ours, theirs in zip(found.graph.nodes, gm.graph.nodes, strict=True):
        assert (ours.name, ours.target) == (theirs.name, theirs.target)
        assert described(ours.meta.get("val")) == described(theirs.meta.get("val"))
        for key in ("desc", "stack_trace"):
            assert ours.meta.get(key) == theirs.meta.get(key)
        assert str(ours.meta.get("original_aten")) == str(theirs.meta.get("original_aten"))
    inputs = torch.randn(5, 4), torch.randn(4, 6)
    for ours, theirs in zip(found(*inputs), gm(*inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@torch.no_grad()
def test_graphs_of_many_sizes_are_not_written():
    gm = functional(one_more, torch.randn(3), dynamic=True)
    with pytest.raises(UnserializableError, match="SymInt in a graph with static sizes"):
        pack_static(gm)
