"""Execution: streams, contexts, memory, threads, and what the double refuses."""

import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dynamo_backends.trt.engine import Engine
from dynamo_backends.trt.engine_builder import Settings, build, serialize
from dynamo_backends.trt.options import TensorRTOptions
from tests.checking import check
from tests.doubles.tensorrt.checking import Misuse
from tests.trt.conftest import Machine
from tests.trt.helpers import compiled, executable, net


def test_inputs_are_read_where_they_are(
    machine: Machine, strict_memory: None, monkeypatch: pytest.MonkeyPatch
):
    model, x = net().to(machine.device), torch.randn(4, 6, device=machine.device)
    run, _ = compiled(model, x)
    given: list[dict[str, Tensor]] = []
    original = Engine.run

    def watch(self: Any, context: Any, stream: int, tensors: Any, *more: Any) -> None:
        given.append(dict(tensors))
        original(self, context, stream, tensors, *more)

    monkeypatch.setattr(Engine, "run", watch)
    with torch.no_grad():
        first = run(x)
        kept = first.clone()
        second = run(torch.randn(4, 6, device=machine.device))
    addresses = [t.data_ptr() for t in given[0].values()]
    assert x.data_ptr() in addresses
    assert first.data_ptr() in addresses
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, kept)


def test_unusual_inputs(machine: Machine):
    def fn(x: Tensor, y: Tensor, number: Tensor) -> tuple[Tensor, ...]:
        return x * number + y, y.sum(0), (x > 0).any()

    device = machine.device
    number = torch.tensor(2.5)  # on the CPU, wherever the others are
    wide, line = torch.randn(6, 8, device=device), torch.randn(4, device=device)
    check(fn, wide[::2, 1::2], line.expand(3, 4), number, backend="tensorrt")
    torch._dynamo.reset()
    empty = torch.randn(0, 4, device=device)
    check(fn, empty, empty.clone(), number, backend="tensorrt", ops_in_eager=None)


def test_each_stream_has_contexts_of_its_own(double: Machine):
    model, x = net(), torch.randn(4, 6)
    run, report = compiled(model, x)
    assert double.host is not None
    handles = []

    def elsewhere() -> None:
        assert double.host is not None
        with double.host.stream(0) as handle:
            handles.append(handle)
        with torch.no_grad():
            torch.testing.assert_close(run(x), model(x))

    for _ in range(2):  # one after the other: a context must not wander between streams
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))
    assert len(set(handles)) == 2
    assert double.log.contexts == 3
    assert report.runtime_fallbacks == []


def test_scratch_memory_is_torchs(double: Machine, monkeypatch: pytest.MonkeyPatch):
    kinds, given = [], []
    engine, context = (
        getattr(sys.modules["tensorrt"], n) for n in ("ICudaEngine", "IExecutionContext")
    )
    create, put = engine.create_execution_context, context.set_device_memory
    monkeypatch.setattr(
        engine, "create_execution_context", lambda s, kind: (kinds.append(kind), create(s, kind))[1]
    )
    monkeypatch.setattr(
        context, "set_device_memory", lambda s, at, size: (given.append(size), put(s, at, size))[1]
    )
    run, _ = compiled(net(), torch.randn(3, 6), dynamic=True)
    with torch.no_grad():
        run(torch.randn(4, 6))
    assert {kind.name for kind in kinds} == {"USER_MANAGED"}
    assert given == [2048, 2048]  # as much as these shapes need


def test_a_failing_execution_falls_back(double: Machine, monkeypatch: pytest.MonkeyPatch):
    context = sys.modules["tensorrt"].IExecutionContext
    model, x = net(), torch.randn(4, 6)
    run, report = compiled(model, x)
    monkeypatch.setattr(context, "execute_async_v3", lambda self, stream: False)
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))
    assert report.runtime_fallbacks == [
        "RuntimeError: TensorRT cannot run the engine: it gives no reason"
    ]


def test_an_engine_of_another_graph_is_refused(double: Machine):
    from dynamo_backends.interface.errors import CompileError
    from dynamo_backends.runtime.prepared_executables import Prologue
    from dynamo_backends.trt.runtime import TensorRTExecutable

    x = torch.randn(4, 6)
    _, first = compiled(net(), x)
    ran = executable(first)
    torch._dynamo.reset()
    _, other = compiled(
        nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).eval(), x.half().float()
    )
    graph = executable(other).graph
    module = graph.copy()
    for node in module.placeholders:
        node.meta = {**node.meta, "val": node.meta["val"].half()}
    with pytest.raises(CompileError, match="the engine has the tensors"):
        TensorRTExecutable(module, ran.program, False, Prologue(module))


def test_options_reach_the_builder(double: Machine):
    options = TensorRTOptions(
        optimization_level=1, workspace=1 << 16, hardware_compatibility="ampere_plus",
        version_compatible=True, weight_streaming=300,
    )  # fmt: skip
    model, x = net(), torch.randn(4, 6)
    run, report = compiled(
        model, x, optimization_level=1, workspace=1 << 16, hardware_compatibility="ampere_plus",
        version_compatible=True, weight_streaming=300,
    )  # fmt: skip
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))
    (facts,) = double.log.builds
    assert facts["level"] == options.optimization_level
    assert facts["workspace"] == options.workspace
    assert facts["hardware"] == "AMPERE_PLUS"
    assert {"VERSION_COMPATIBLE", "WEIGHT_STREAMING", "REFIT", "STRIP_PLAN"} < set(facts["flags"])
    assert double.log.budgets == [300]
    assert report.runtime_fallbacks == []


def test_tensorrt_can_decide_how_much_is_streamed(double: Machine):
    model, x = net(), torch.randn(4, 6)
    run, _ = compiled(model, x, weight_streaming=0)
    with torch.no_grad():
        torch.testing.assert_close(run(x), model(x))
    assert double.log.budgets == [1 << 10]


class TestTheDouble:
    """It notices what the vendor leaves undefined; else the tests above would show nothing."""

    def engine(self) -> tuple[Engine, Tensor, Tensor]:
        import onnx_ir as ir

        kind = ir.TensorType(ir.DataType.FLOAT)
        x = ir.Value(name="x", shape=ir.Shape([2, 3]), type=kind)
        node = ir.node("Tanh", [x])
        y = node.outputs[0]
        y.name, y.shape, y.type = "y", x.shape, kind
        graph = ir.Graph([x], [y], nodes=[node], opset_imports={"": 20}, name="main")
        settings = Settings(TensorRTOptions(), 0, False)
        model = serialize(ir.Model(graph, ir_version=10))
        engine = Engine(build(model, {}, settings), model, settings)
        return engine, torch.randn(2, 3), torch.empty(2, 3)

    def run(self, engine: Engine, *tensors: tuple[str, Tensor], stream: int | None = None) -> None:
        from tests.doubles.tensorrt import HostDevice

        with HostDevice().stream(0) as current:
            context = engine.take_context(current)
            engine.run(context, stream or current, tensors, (), torch.device("cpu"))

    def test_what_is_right(self, double: Machine, strict_memory: None):
        engine, x, y = self.engine()
        self.run(engine, ("x", x), ("y", y))
        torch.testing.assert_close(y, x.tanh())

    def test_a_missing_address(self, double: Machine):
        engine, x, _ = self.engine()
        with pytest.raises(Misuse, match=r"no address was set for \['y'\]"):
            self.run(engine, ("x", x))

    def test_an_unknown_name(self, double: Machine):
        engine, x, y = self.engine()
        with pytest.raises(RuntimeError, match="rejects the memory of 'z'"):
            self.run(engine, ("x", x), ("z", y))

    def test_another_stream(self, double: Machine):
        engine, x, y = self.engine()
        with pytest.raises(Misuse, match="not the current stream"):
            self.run(engine, ("x", x), ("y", y), stream=1)

    def test_memory_that_is_gone(self, double: Machine, strict_memory: None):
        engine, x, y = self.engine()
        small = torch.empty(2)
        with pytest.raises(Misuse, match="the memory of 'y' is gone"):
            self.run(engine, ("x", x), ("y", small))
        assert y.shape == (2, 3)

    def test_a_recorded_context_is_not_used_again(self, double: Machine):
        engine, x, y = self.engine()
        used = []
        for capturing in (False, True, False):
            double.host.capturing = capturing
            with double.host.stream(0) as stream:
                used.append(engine.take_context(stream))
                engine.run(used[-1], stream, [("x", x), ("y", y)], [], x.device)
                engine.give_context(stream, used[-1])
        assert used[0] is used[1]
        assert used[2] is not used[1]

    def test_a_wrong_shape(self, double: Machine):
        engine, _, _ = self.engine()
        context = engine.take_context(1)
        assert not context.set_input_shape("x", (3, 3))
        assert not context.set_input_shape("z", (2, 3))
        with pytest.raises(Misuse):
            context.set_input_shape("x", ("2", "3"))

    def test_wrong_types_and_names(self, double: Machine):
        trt = sys.modules["tensorrt"]
        builder = trt.Builder(_Quiet())
        with pytest.raises(Misuse, match="unknown network flags"):
            builder.create_network(1 << 7)
        with pytest.raises(Misuse, match="no BuilderFlag"):
            builder.create_builder_config().set_flag(6)
        with pytest.raises(AttributeError, match="has no attribute 'optimization_level'"):
            builder.create_builder_config().optimization_level = 3
        with pytest.raises(RuntimeError, match="inconsistent"):
            builder.create_optimization_profile().set_shape("x", (3,), (2,), (4,))
        with pytest.raises(Misuse, match=r"ILogger\.__init__ was not called"):
            trt.Runtime(_Uninitialised())

    def test_weights(self, double: Machine):
        from tests.trt.onnx_models import batch_norm

        settings, model, weights = batch_norm()
        engine = Engine(build(model, {}, settings), model, settings)
        x = torch.randn(2, 3, 4)
        with pytest.raises(Misuse, match="before it got the weights"):
            self.run(engine, ("x", x), ("y", torch.empty_like(x)))
        engine.refit(weights)
        y = torch.empty_like(x)
        self.run(engine, ("x", x), ("y", y))
        names = ("mean", "variance", "scale", "shift")
        expected = nn.functional.batch_norm(x, *(weights[n] for n in names))
        torch.testing.assert_close(y, expected)


class _Quiet:
    """Made by the tests that call the double directly."""

    def __new__(cls) -> Any:
        logger = sys.modules["tensorrt"].ILogger

        class Quiet(logger):  # type: ignore[misc]
            def log(self, severity: Any, msg: str) -> None:
                pass

        return Quiet()


class _Uninitialised:
    def __new__(cls) -> Any:
        logger = sys.modules["tensorrt"].ILogger

        class Uninitialised(logger):  # type: ignore[misc]
            def __init__(self) -> None:
                pass

        return Uninitialised()
