"""Sessions and bindings: threads, memory, changing weights, processes and threads."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends import Bound, OptionError
from dynamo_backends.interface.errors import ForkedProcessError
from dynamo_backends.ort import runtime
from dynamo_backends.ort.session import SessionSettings, make_session
from tests import backend_checks as checks
from tests.backend_checks import mlp
from tests.checking import check

CPU = SessionSettings(providers=(("CPUExecutionProvider", ()),))


compiled = partial(checks.compiled, "onnxrt")


def test_sessions_have_torchs_threads_which_do_not_spin_after_a_run():
    options = CPU.options()
    assert options.intra_op_num_threads == torch.get_num_threads()
    assert options.inter_op_num_threads == 1
    assert options.get_session_config_entry("session.force_spinning_stop") == "1"


def test_a_processor_is_free_after_a_call():
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    compiled_mlp = torch.compile(model, backend="onnxrt")
    x = torch.randn(256, 512)
    with torch.no_grad():
        for _ in range(5):
            compiled_mlp(x)
        started = time.process_time()
        time.sleep(0.05)
    assert time.process_time() - started < 0.02, "threads of ONNX Runtime go on spinning"


def test_a_sum_that_is_normalized_is_not_fused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    original = SessionSettings.options

    def saving(settings: SessionSettings) -> onnxruntime.SessionOptions:
        options = original(settings)
        options.optimized_model_filepath = str(tmp_path / "model.onnx")
        return options

    monkeypatch.setattr(SessionSettings, "options", saving)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x + self.linear(x))

    with torch.no_grad():
        torch.compile(Block().eval(), backend="onnxrt")(torch.randn(2, 8, 64))
    kinds = {node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node}
    assert "LayerNormalization" in kinds


def test_options_reach_the_session(monkeypatch: pytest.MonkeyPatch):
    made: list[SessionSettings] = []
    original = make_session

    def watch(model: bytes, weights: Any, settings: SessionSettings, ranged: bool) -> Any:
        made.append(settings)
        return original(model, weights, settings, ranged)

    monkeypatch.setattr(runtime, "make_session", watch)
    config = {"session.intra_op.allow_spinning": "0"}
    function = torch.compile(
        mlp(),
        backend="onnxrt",
        options={
            "graph_optimization_level": "basic",
            "intra_op_threads": 2,
            "session_config": config,
            "provider_options": {"arena_extend_strategy": "kSameAsRequested"},
        },
    )
    with torch.no_grad():
        function(torch.randn(2, 6))
    options = made[-1].options()
    assert options.intra_op_num_threads == 2
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert str(options.graph_optimization_level).endswith("ORT_ENABLE_BASIC")
    assert dict(made[-1].providers) == {
        "CPUExecutionProvider": (("arena_extend_strategy", "kSameAsRequested"),)
    }


def test_inputs_are_read_where_they_are_and_each_call_has_results_of_its_own():
    x = torch.randn(4, 6)
    function, _, executable = compiled(mlp(), x)
    assert executable._inputs[0].check(x).data_ptr() == x.data_ptr()
    checks.each_call_has_results_of_its_own(function, x)


def test_empty_tensors():
    check(lambda x: (x * 2, x.sum(0), torch.cat([x, x + 1])), torch.randn(0, 4), backend="onnxrt")


def test_weights_that_change_at_every_call_stop_being_prepared(monkeypatch: pytest.MonkeyPatch):
    model = mlp()
    function, _, executable = compiled(model, torch.randn(4, 6))
    made: list[Any] = []
    original = make_session

    def count(*args: Any) -> Any:
        made.append(args)
        return original(*args)

    monkeypatch.setattr(runtime, "make_session", count)
    checks.weights_that_change_stop_being_prepared(function, model, executable, made)


def test_results_are_the_callers():
    checks.results_are_the_callers("onnxrt")


def test_threads_can_share_a_compiled_model():
    model = mlp()
    function, _, executable = compiled(model, torch.randn(4, 6))
    weights = list(model.parameters())
    order = [executable.graph.inputs[i].name for i in executable.graph.weights]
    assert len(order) == len(weights)
    checks.threads_agree(function, model, 4, 6)


def test_a_forked_process_gets_an_error_instead_of_waiting_for_threads():
    _, _, executable = compiled(mlp(), torch.randn(4, 6))
    executable._pid = -1
    with pytest.raises(ForkedProcessError, match="do not survive a fork"):
        executable.bind(())
    bound: Bound = executable._run(None)
    with pytest.raises(ForkedProcessError):
        bound([torch.randn(4, 6)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"graph_optimization_level": "max"}, "one of 'all', 'extended', 'basic', 'none'"),
        ({"intra_op_threads": -1}, "must be at least 0, not -1"),
        ({"session_config": {"session.x": 1}}, "must map strings to strings; 'session.x': 1"),
        ({"provider_options": "x"}, "must be dict or None, not 'x'"),
        ({"provider_option": {}}, "Did you mean 'provider_options'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(OptionError, match=message):
        dynamo_backends.get_backend("onnxrt").Options.parse(options, "onnxrt")


def test_a_wrong_session_entry_is_reported_and_the_graph_runs_in_eager():
    with torch.no_grad(), dynamo_backends.record() as reports:
        model, x = mlp(), torch.randn(2, 6)
        options = {"provider_options": {"no_such_option": "1"}}
        result = torch.compile(model, backend="onnxrt", options=options)(x)
        torch.testing.assert_close(result, model(x))
    assert reports[0].ops_on_backend > 0 or reports[0].fallbacks


class Masked(nn.Module):
    """With buffers of bools, also one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 300)
        self.register_buffer("mask", torch.rand(300) > 0.5)
        self.register_buffer("whole", torch.tensor(True))

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(self.mask, self.linear(x).relu(), -1.0) * self.whole


@pytest.mark.parametrize("freezing", ["probe", "off"])
def test_weights_of_bools_are_read(freezing: str) -> None:
    model, x = Masked().eval(), torch.randn(4, 8)
    options = {"cache": False, "min_block_size": 1, "freezing": freezing}
    with dynamo_backends.record() as reports, torch.no_grad():
        run = torch.compile(model, backend="onnxrt", options=options)
        torch.testing.assert_close(run(x), model(x))
        model.mask.logical_not_()
        torch.testing.assert_close(run(x), model(x))
    assert [(r.events, r.ops_in_eager) for r in reports] == [([], 0)]
