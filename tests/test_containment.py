"""Failures planted in every stage of every backend: results are eager's, and the reason is told."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends import CompileError, DeviceError, Executable, FallbackRefusedError, GraphReport
from dynamo_backends._torch_private import dynamo_control_exceptions
from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.pass_sequence import PassSequence
from dynamo_backends.graph.passes import PASSES
from dynamo_backends.interface.backend import Backend
from dynamo_backends.interface.errors import must_propagate
from dynamo_backends.runtime.prepared_executables import make_input_merger
from tests.checking import assert_same, widen

BACKENDS = (
    *("openxla", "onnxrt", "ov", "tvm", "iree", "inductor_freezing", "inductor_max_autotune"),
    *("ts_trace", "ofi", "static_runtime", "onednn_graph", "ltc", "ltc_trace", "autotune"),
)
TEXT = "planted here"


def fail(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError(TEXT)


class Interpreted(Executable):
    """Runs a graph as eager does, and fails as it is told to.

    Args:
        graph: The graph.
        calls: How many calls end well.
        fails: Names of methods that fail.
    """

    def __init__(self, graph: Graph, calls: int, fails: Sequence[str]):
        self._graph = graph.copy()
        self._merge = make_input_merger(graph)
        self._calls = calls
        for name in fails:
            setattr(self, name, fail)

    def bind(self, weights: Sequence[Tensor]) -> Any:
        def run(activations: list[Tensor]) -> list[Tensor]:
            if not self._calls:
                activations.clear()
                fail()
            self._calls -= 1
            return self.run_graph(self._merge(weights, activations))

        return run, range(len(weights))

    def run_graph(self, values: list[Tensor]) -> list[Tensor]:
        return list(self._graph.module(*values))

    def dump(self) -> dict[str, bytes]:
        return {"name": b""}


class Planting:
    """Where failures are planted.

    Args:
        monkeypatch: Takes them out again.
        backends: The backend under test, and the candidates of autotune.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backends: Sequence[Backend]):
        self._monkeypatch = monkeypatch
        self._backends = backends

    def at(self, *names: str) -> None:
        """Functions of this package fail."""
        for name in names:
            self._monkeypatch.setattr(f"dynamo_backends.{name}", fail)

    def method(self, name: str, value: Any = fail) -> None:
        """A method of the backends fails, or is another one."""
        for backend in self._backends:
            self._monkeypatch.setattr(backend, name, value, raising=False)

    def a_pass(self, name: str) -> None:
        """A pass fails after it has begun to change the graph."""

        def half(graph: Graph) -> bool:
            output = graph.module.graph.output_node()
            output.args = ((graph.placeholders[0],),)
            return bool(fail())

        passes = [replace(p, run=half) if p.name == name else p for p in PASSES.passes]
        sequence = PassSequence(passes, PASSES.given)
        self._monkeypatch.setattr("dynamo_backends.pipeline.shapes.strategy.PASSES", sequence)

    def executables(self, calls: int = 99, *fails: str) -> None:
        """Compiled code is a double that fails."""
        self.method("plan", lambda graph, options: dynamo_backends.Plan())
        self.method("compile", lambda graph, options: Interpreted(graph, calls, fails))
        self.method("cache_key", lambda options: "double")
        self.method("load", lambda parts, graph, options: Interpreted(graph, calls, fails))


@dataclass(frozen=True)
class Stage:
    """A stage in which something fails.

    Attributes:
        plant: Plants the failure.
        trains: Gradients are computed.
        apart: autotune does not tell of it: the winner is another, or was compared already.
        dynamic: Shapes are symbolic.
        options: Of the backend.
    """

    plant: Callable[[Planting], None]
    trains: bool = False
    apart: bool = False
    dynamic: bool = False
    options: dict[str, Any] = field(default_factory=lambda: {"cache": False})


def at(*names: str, **settings: Any) -> Stage:
    """Functions of this package fail; what is compiled is a double."""
    return Stage(lambda p: (p.executables(), p.at(*names))[0], **settings)


CACHED: dict[str, Any] = {"options": {"cache": True}}

STAGES: dict[str, Stage] = {
    "availability": Stage(lambda p: p.method("availability")),
    "what is kept whole": Stage(lambda p: p.method("preserved_operators")),
    "taking a graph": Stage(lambda p: p.method("compile_captured_graph")),
    "looking at inputs": at("pipeline.captured.inspect_captured"),
    "AOT Autograd": at("pipeline.captured.compile_functional"),
    "normal form": at("pipeline.captured.normalize"),
    "devices": Stage(lambda p: p.method("check_graph")),
    "describing inputs": at("pipeline.captured.describe_inputs", apart=True),
    "specialization": at("pipeline.compiled_graph.specialize", dynamic=True),
    **{
        f"pass {each.name}": Stage(functools.partial(Planting.a_pass, name=each.name))
        for each in PASSES.passes
    },
    "partition": at("pipeline.program_builder.partition"),
    "plan": Stage(lambda p: p.method("plan")),
    "compile": Stage(lambda p: (p.executables(), p.method("compile"))[0]),
    "describing parts": at("pipeline.program_builder.describe_parts", apart=True),
    "publishing": at("interface.report.send_to_recorders", apart=True),
    "fingerprint": at("pipeline.program_builder.fingerprint_with_plan"),
    "cache key": Stage(lambda p: (p.executables(), p.method("cache_key"))[0], apart=True, **CACHED),
    "cache read": at("runtime.cache.DiskCache.get", apart=True, **CACHED),
    "cache write": at("runtime.cache.DiskCache.put", apart=True, **CACHED),
    "dump": Stage(lambda p: p.executables(99, "dump"), apart=True, **CACHED),
    "reporting to a block": Stage(lambda p: p.executables(99, "set_report")),
    "weights": Stage(lambda p: p.executables(99, "bind")),
    "first call": Stage(lambda p: p.executables(0)),
    "later call": Stage(lambda p: p.executables(1)),
    "freezing": at("runtime.weight_binding.WeightSnapshot"),
    "checking weights": at("runtime.weight_binding.WeightSnapshot.is_current"),
    "verification": at("runtime.program.Comparison", apart=True),
    "verification, eager again": at("verify.first_call.EagerInterpreter", apart=True),
    "verification, comparing": at("verify.first_call._Outputs.compare", apart=True),
    "assembling": at("pipeline.program_builder.Program"),
    "forward and backward, normal form": at("pipeline.captured.normalize", trains=True),
    "forward and backward, compile": Stage(
        lambda p: (p.executables(), p.method("compile"))[0], trains=True
    ),
    "forward and backward, first call": Stage(lambda p: p.executables(0), trains=True),
    "forward and backward, later call": Stage(lambda p: p.executables(1), trains=True),
}


def told(reports: Sequence[GraphReport]) -> str:
    """All that reports give as reasons."""
    found: list[str] = []
    for r in reports:
        found += [r.reverted, *r.runtime_fallbacks, *r.failures, *r.unverified]
        found += [f.reason for f in r.fallbacks] + [c.reason for c in r.candidates]
    return "; ".join(found)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh()).eval()


def outcome(model: Callable[..., Any], module: nn.Module, x: Tensor, trains: bool) -> list[Tensor]:
    """Results, and gradients if asked for."""
    with torch.set_grad_enabled(trains):
        y = model(x)
    return [y.detach(), *torch.autograd.grad(y.sum(), module.parameters())] if trains else [y]


def agrees(name: str, stage: Stage, module: nn.Module | None = None) -> list[GraphReport]:
    """Calls a compiled model three times and compares with eager."""
    options = dict(stage.options)
    if name == "autotune":
        options["candidates"] = ("openxla",)
    module = net() if module is None else module
    compiler = dynamo_backends.compiler(name, **options)
    compiled = torch.compile(module, backend=compiler, dynamic=stage.dynamic)
    precise = widen(module)
    with dynamo_backends.record() as reports:
        for _ in range(3):
            x = torch.randn(2, 4)
            assert_same(
                outcome(module, module, x, stage.trains),
                outcome(compiled, module, x, stage.trains),
                outcome(precise, precise, x.double(), stage.trains),
            )
    return reports


@pytest.fixture
def backends(request: pytest.FixtureRequest) -> list[Backend]:
    """The backend under test, and whoever it would choose."""
    name = request.getfixturevalue("name")
    names = (name, "openxla") if name == "autotune" else (name,)
    return [dynamo_backends.get_backend(n) for n in names]


@pytest.fixture(autouse=True)
def _as_users_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the checks, under which failures are raised."""
    monkeypatch.delenv("DYNAMO_BACKENDS_CHECK")


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_failure_leaves_eager_and_its_reason(
    name: str,
    stage: str,
    backends: list[Backend],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    planted = STAGES[stage]
    planted.plant(Planting(monkeypatch, backends))
    reports = agrees(name, planted)
    if name != "autotune" or not planted.apart:
        assert TEXT in (caplog.text if stage == "publishing" else told(reports))


RANGED = (
    *("onnxrt", "ov", "tvm", "iree", "inductor_freezing", "inductor_max_autotune"),
    *("ts_trace", "ofi", "static_runtime"),
)


@pytest.mark.parametrize("name", RANGED)
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_program_of_the_first_sizes_stays_if_replacing_it_fails(
    name: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch
):
    backend = dynamo_backends.get_backend(name)
    stage = at("pipeline.shapes.shared_programs.SharedPrograms.note_compiled", dynamic=dynamic)
    stage.plant(Planting(monkeypatch, [backend]))
    reports = agrees(name, stage)
    assert f"replacing the program of the first sizes failed (ZeroDivisionError: {TEXT}" in told(
        reports
    )


TRIALS = {
    "onnxrt": "ort.trial._try",
    "ov": "openvino.trial._try",
    "tvm": "tvm.trial._try",
    "iree": "iree.trial._try_all",
}


@pytest.mark.parametrize("name", TRIALS)
def test_a_trial_that_fails_leaves_the_call_to_eager(name: str, monkeypatch: pytest.MonkeyPatch):
    Planting(monkeypatch, ()).at(TRIALS[name])
    wide = nn.Sequential(nn.Linear(4, 29), nn.Tanh()).eval()  # of no other test: it is asked about
    (report,) = agrees(name, Stage(lambda p: None), wide)
    (fallback,) = [f for f in report.fallbacks if f.op == "aten.addmm.default"]
    assert TEXT in fallback.reason


def test_a_call_about_which_asking_fails_costs_no_other(monkeypatch: pytest.MonkeyPatch):
    backend = dynamo_backends.get_backend("openxla")
    original = backend.supports
    addmm = torch.ops.aten.addmm.default
    asked = lambda n, options: fail() if n.target is addmm else original(n, options)  # noqa: E731
    monkeypatch.setattr(backend, "supports", asked)
    (report,) = agrees("openxla", Stage(lambda p: None, options={"min_block_size": 1}))
    (fallback,) = report.fallbacks
    assert fallback.op == "aten.addmm.default"
    failed = f"querying openxla for supported operators failed (ZeroDivisionError: {TEXT})"
    assert fallback.reason == failed


DECISIONS = (
    "tuning_subjects.hash_json",
    "tuning_subjects.iter_candidates",
    "tuner.DecisionStore.get",
    "tuner.DecisionStore.put",
    "tuner.TuningSession.choose_winner",
)


@pytest.mark.parametrize(
    "where",
    [*DECISIONS, "tuning_subjects.CapturedGraphSubject.report_choice", "tuning_subjects.CostModel"],
)
def test_autotune_without_decisions(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    Planting(monkeypatch, ()).at(f"autotune.{where}")
    agrees("autotune", Stage(lambda p: None, **CACHED))
    assert TEXT in caplog.text


STRICT = ("availability", "AOT Autograd", "normal form", "partition", "plan", "compile")


@pytest.mark.parametrize("stage", [*STRICT, "weights", "first call", "later call"])
def test_failures_are_errors_if_the_user_says_so(stage: str, monkeypatch: pytest.MonkeyPatch):
    backend = dynamo_backends.get_backend("openxla")
    STAGES[stage].plant(Planting(monkeypatch, [backend]))
    options = {**STAGES[stage].options, "fallback": "error"}
    with pytest.raises(Exception, match="fallback=") as info:
        agrees("openxla", replace(STAGES[stage], options=options))
    chain: list[BaseException | None] = [info.value]
    while chain[-1] is not None:
        chain.append(getattr(chain[-1], "inner_exception", None) or chain[-1].__cause__)
    assert any(isinstance(error, FallbackRefusedError) and TEXT in str(error) for error in chain)


def test_what_the_user_has_to_act_on_is_raised(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any) -> None:
        raise DeviceError("move the model to the CPU")

    monkeypatch.setattr(dynamo_backends.get_backend("openxla"), "check_graph", refuse)
    with pytest.raises(Exception, match="move the model to the CPU"):
        agrees("openxla", STAGES["devices"])


def test_interrupts_and_what_steers_dynamo_pass(monkeypatch: pytest.MonkeyPatch):
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    stage = STAGES["normal form"]
    with monkeypatch.context() as context:
        context.setattr("dynamo_backends.pipeline.captured.normalize", interrupt)
        with pytest.raises(KeyboardInterrupt):
            agrees("openxla", stage)
    assert not told(agrees("openxla", stage))
    for kind in dynamo_control_exceptions():
        assert must_propagate(kind.__new__(kind))
    assert not must_propagate(CompileError("refused"))


def test_no_memory_is_raised_and_costs_one_call(monkeypatch: pytest.MonkeyPatch):
    backend = dynamo_backends.get_backend("openxla")
    Planting(monkeypatch, [backend]).executables()
    compiled = torch.compile(net(), backend=dynamo_backends.compiler("openxla", cache=False))
    with torch.no_grad(), dynamo_backends.record() as reports:
        compiled(torch.ones(2, 4))
        with monkeypatch.context() as context:
            context.setattr(Interpreted, "run_graph", no_memory)
            with pytest.raises(MemoryError):
                compiled(torch.ones(2, 4))
        compiled(torch.ones(2, 4))
    assert [r.runtime_fallbacks for r in reports] == [[]]


def no_memory(*_: Any) -> list[Tensor]:
    raise MemoryError


def test_inputs_that_eager_refuses_do_not_cost_the_block(monkeypatch: pytest.MonkeyPatch):
    backend = dynamo_backends.get_backend("openxla")
    Planting(monkeypatch, [backend]).executables()
    options = {"cache": False}
    compiled = torch.compile(nn.functional.embedding, backend="openxla", options=options)
    table = torch.randn(3, 4)
    with dynamo_backends.record() as reports:
        for index, valid in ((1, True), (7, False), (2, True)):
            if valid:
                assert torch.equal(compiled(torch.tensor([index]), table), table[[index]])
                continue
            with pytest.raises(IndexError, match="out of range"):
                compiled(torch.tensor([index]), table)
    assert [(r.ops_on_backend, r.runtime_fallbacks) for r in reports] == [(1, [])]
