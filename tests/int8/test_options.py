"""What int8 needs and what it does not go with is said before anything is compiled."""

from typing import Any

import pytest
import torch
from torch import nn

import dynamo_backends
from dynamo_backends import BackendUnavailableError, OptionError, compile_step, compiler
from dynamo_backends.int8 import options
from dynamo_backends.interface.registry import get_backend
from tests.int8.planted import batches, net

GIVEN: dict[str, Any] = {
    "precision": "int8", "tolerance": {"cosine": 0.99}, "calibration": batches(2)
}  # fmt: skip
BACKENDS = ("autotune", "onnxrt", "ov")


def refused(backend: str, **options: Any) -> str:
    with pytest.raises(OptionError) as raised:
        get_backend(backend).Options.parse(options, backend)
    return str(raised.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_tolerance_it_is_said_what_to_state(backend: str):
    text = refused(backend, precision="int8", calibration=batches(2))
    assert f"precision='int8' of {backend} changes results" in text
    for way in ('{"cosine": 0.99}', '{"relative": 0.05}', "{metric: 0.98}"):
        assert way in text


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_batches_it_is_said_what_to_give(backend: str):
    text = refused(backend, precision="int8", tolerance={"cosine": 0.99})
    assert "is validated on batches of real inputs" in text
    assert "calibration=[...]" in text


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["tolerance", "calibration"])
def test_what_is_for_int8_is_not_ignored_without_it(backend: str, name: str):
    text = refused(backend, **{name: GIVEN[name]})
    assert f"option {name!r} of {backend} requires precision='int8'" in text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"freezing": "off"}, "requires frozen weights"),
        ({"while_compiling": "eager"}, "while_compiling must be 'wait', not 'eager'"),
    ],
)
def test_options_that_do_not_go_with_it(options: dict[str, Any], said: str):
    assert said in refused("onnxrt", **GIVEN, **options)


@pytest.mark.parametrize("options", [{"mode": "background"}, {"isolate": "all"}])
def test_autotune_proves_in_this_process(options: dict[str, Any]):
    text = refused("autotune", **GIVEN, **options)
    assert "set mode='wait', and isolate='third-party' or 'off'" in text


@pytest.mark.parametrize("backend", ["autotune", "planted_int8"])
@pytest.mark.usefixtures("plant")
def test_gradients_are_refused(backend: str):
    compiled = torch.compile(net(), backend=compiler(backend), options=GIVEN)
    with pytest.raises(OptionError, match=r"Call the model under torch\.no_grad\(\)"):
        compiled(batches()[0])


@pytest.mark.parametrize("backend", ["autotune", "onnxrt"])
def test_steps_are_refused(backend: str):
    model = net()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(OptionError, match="does not support precision='int8'"):
        compile_step(
            lambda x: model(x).sum(),
            model=model,
            optimizer=optimizer,
            backend=backend,
            options=GIVEN,
        )


def test_packages_are_refused(tmp_path: Any):
    with pytest.raises(OptionError, match="save with onnxrt does not support precision='int8'"):
        dynamo_backends.save(
            net(), tmp_path / "model.dbp", (batches()[0],), backend="onnxrt", options=GIVEN
        )


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.fc(x) + self.calls


@pytest.mark.usefixtures("plant")
def test_a_model_that_updates_its_state_runs_in_eager(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("DYNAMO_BACKENDS_CHECK")
    model = Counting()
    with torch.no_grad(), dynamo_backends.record() as reports:
        compiled = torch.compile(model, backend=compiler("planted_int8"), options=GIVEN)
        compiled(batches()[0])
    assert "updates an input or buffer in place" in reports[0].reverted
    assert model.calls == 1, "no batch of calibration has been counted"


@pytest.mark.parametrize(
    ("backend", "precision", "package"),
    [("ov", "int8", "nncf"), ("inductor_freezing", "int8-dynamic", "torchao")],
)
def test_without_the_quantizer_it_is_said_what_to_install(
    backend: str, precision: str, package: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        options, "describe_missing", lambda wanted: f"{', '.join(wanted)} is not installed"
    )
    given = {**GIVEN, "precision": precision}
    said = f"{package} is not installed; run: pip install 'dynamo-backends\\[int8\\]'"
    with torch.no_grad(), pytest.raises(BackendUnavailableError, match=said):
        torch.compile(net(), backend=backend, options=given)(batches()[0])
    with torch.no_grad(), dynamo_backends.record() as reports:
        chosen = {**GIVEN, "candidates": [backend]}
        torch.compile(net(), backend="autotune", options=chosen)(batches()[0])
    (row,) = (r for r in reports[0].candidates if r.name == f"{backend}@{precision}")
    assert "could not be compiled: BackendUnavailableError" in row.reason
    assert "pip install 'dynamo-backends[int8]'" in row.reason


def test_the_same_batches_and_bounds_give_the_same_compiler_and_others_do_not():
    def bounded(least: float) -> Any:
        return lambda expected, results: least

    metric = bounded(1.0)
    first = compiler("onnxrt", **{**GIVEN, "tolerance": {metric: 0.5}})
    assert compiler("onnxrt", **{**GIVEN, "tolerance": {metric: 0.5}}) is first
    assert compiler("onnxrt", **{**GIVEN, "tolerance": {bounded(2.0): 0.5}}) is not first
    other = [*batches(1), batches(2)[1] + 1e-3]
    assert (
        compiler("onnxrt", **{**GIVEN, "tolerance": {metric: 0.5}, "calibration": other})
        is not first
    )


def test_processors_without_vnni_saturate(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(options.platform, "machine", lambda: "x86_64")
    for sets, saturates in ((("avx2", "fma"), True), (("avx2", "avx_vnni"), False), ((), True)):
        monkeypatch.setattr(options, "cpu_flags", lambda sets=sets: sets)
        assert options.saturates() is saturates
    monkeypatch.setattr(options.platform, "machine", lambda: "aarch64")
    assert not options.saturates()
