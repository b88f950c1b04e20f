"""Tensors on devices that are not this package's: handed to their owner, or refused.

PrivateUse1 is one per process, so what uses it runs in processes of its own.
"""

import subprocess
import sys
import textwrap
import types
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

from dynamo_backends import Availability, compiler, get_backend
from dynamo_backends.interface.errors import DeviceError
from dynamo_backends.runtime.foreign_devices import compile_for_foreign_device, foreign_device_type
from tests.bench.programs import ROOT

DOUBLE = """
import torch
from torch import Tensor, nn
from tests.doubles.python_device import raised, start

Foreign = start("foreign")
x = Foreign(torch.arange(6.0).reshape(2, 3))

def function(x, scale=torch.tensor(2.0)):
    return (x * scale).sin()
"""


def run(body: str) -> None:
    script = DOUBLE + textwrap.dedent(body)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_device_without_a_backend_is_refused_by_every_entrance_and_by_steps() -> None:
    run(
        """
        import dynamo_backends
        from dynamo_backends.interface.errors import DeviceError, StepCaptureError

        entrances = [
            lambda: torch.compile(function, backend="openxla")(x),
            lambda: torch.compile(function, backend="inductor_freezing")(x),
            lambda: torch.compile(function, backend=dynamo_backends.compiler("autotune"))(x),
            lambda: dynamo_backends.optimize("onnxrt")(function)(x),
        ]
        for entrance in entrances:
            text = raised(entrance)
            assert "'foreign'" in text and "model.cpu()" in text and "DeviceError" in text, text
            torch._dynamo.reset()

        model = nn.Linear(3, 2)
        model.weight, model.bias = (nn.Parameter(Foreign(p.detach())) for p in model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train(x):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step = dynamo_backends.compile_step(train, model=model, optimizer=optimizer)
        try:
            step(x)
        except DeviceError as error:
            assert isinstance(error, StepCaptureError)
            assert "'foreign'" in str(error) and 'fallback="split"' in str(error)
        else:
            raise AssertionError("nothing was raised")
        """
    )


def test_a_device_with_a_backend_of_its_name_is_handed_over() -> None:
    run(
        """
        import dynamo_backends

        calls = []

        def owner(graph, inputs):
            calls.append(inputs)
            return graph.forward

        torch._dynamo.register_backend(owner, name="foreign")
        for backend in ("openxla", dynamo_backends.compiler("ts_trace")):
            torch._dynamo.reset()
            found = torch.compile(function, backend=backend)(x)
            assert type(found) is Foreign
            torch.testing.assert_close(found.raw, (x.raw * 2).sin())
        assert len(calls) == 2
        assert {t.device.type for t in calls[0]} <= {"foreign", "cpu"}
        """
    )


def on(device: str) -> Tensor:
    """A tensor of a device that this process need not have."""
    with FakeTensorMode():
        return torch.empty(2, 3, device=device)


@pytest.fixture
def graph() -> fx.GraphModule:
    class Sine(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (x.sin(),)

    return fx.symbolic_trace(Sine())


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_devices_of_torchs_own_that_nobody_compiles_for(graph: fx.GraphModule, device: str) -> None:
    text = f"backend='openxla' was called with tensors on the device '{device}'"
    with pytest.raises(DeviceError, match=text):
        compiler("openxla")(graph, [on(device)])


def test_xla_is_compiled_by_torch_xlas_bridge(
    graph: fx.GraphModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`extract_compiled_graph` is what torch_xla documents for Dynamo."""
    compiled = []

    def extract_compiled_graph(module: Any, args: Any) -> Any:
        compiled.append([t.device.type for t in args])
        return module

    bridge = types.ModuleType("torch_xla._dynamo.dynamo_bridge")
    bridge.extract_compiled_graph = extract_compiled_graph  # type: ignore[attr-defined]
    package = types.ModuleType("torch_xla._dynamo")
    package.dynamo_bridge = bridge  # type: ignore[attr-defined]
    for name, module in (
        ("torch_xla", types.ModuleType("torch_xla")),
        ("torch_xla._dynamo", package),
        ("torch_xla._dynamo.dynamo_bridge", bridge),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    with FakeTensorMode():
        x = torch.empty(2, 3, device="xla")
        found = compiler("openxla")(graph, [x])(x)
    assert compiled == [["xla"]]
    (result,) = found
    assert result.device.type == "xla"


def test_xla_without_torch_xla_is_refused(graph: fx.GraphModule) -> None:
    with FakeTensorMode():
        x = torch.empty(2, 3, device="xla")
        compiled = compiler("openxla")(graph, [x])
        with pytest.raises(DeviceError, match=r"torch_xla, which cannot be imported .*model.cpu"):
            compiled(x)


def test_what_a_backend_lists_is_its_own_but_tpus_tensors_are_torch_tpus(
    graph: fx.GraphModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = Availability(True, "", devices=("cpu", "tpu", "mps"))
    monkeypatch.setattr(get_backend("openxla"), "availability", lambda: listed)
    assert compile_for_foreign_device(get_backend("openxla"), graph, [on("mps")]) is None
    with pytest.raises(DeviceError, match="no Dynamo backend named 'xpu'"):
        compile_for_foreign_device(get_backend("openxla"), graph, [on("xpu")])
    monkeypatch.setattr(
        "dynamo_backends.runtime.foreign_devices.foreign_device_type", lambda *_: "tpu"
    )
    with pytest.raises(DeviceError, match="no Dynamo backend named 'tpu'"):
        compile_for_foreign_device(get_backend("openxla"), graph, [])


def test_which_devices_are_foreign() -> None:
    with FakeTensorMode():
        x = torch.empty(2, device="mps")
    assert foreign_device_type([torch.ones(1), torch.ones(1, device="meta"), 3]) is None
    assert foreign_device_type([torch.tensor(1.0), x]) == "mps"
    assert foreign_device_type([x], ["mps"]) is None


def test_meta_tensors_run_as_in_eager() -> None:
    compiled = torch.compile(lambda x: x.sin() @ x.t(), backend="openxla")
    found = compiled(torch.empty(2, 3, device="meta"))
    assert (found.device.type, found.shape) == ("meta", (2, 2))
