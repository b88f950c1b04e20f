"""torch_tpu's tensors and its hold on the TPU, by a double of what it has."""

import subprocess
import sys
import textwrap
from importlib.util import find_spec

import pytest

from tests.bench.programs import ROOT

DOUBLE = """
import copy
import torch
from torch import nn
import dynamo_backends
from dynamo_backends.interface.errors import DeviceError, StepCaptureError
from dynamo_backends.xla import to_device
from tests.doubles import torch_tpu
from tests.doubles.python_device import raised

Tpu, backend = torch_tpu.load()

def on_tpu(model):
    model = copy.deepcopy(model)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(Tpu(parameter.detach())))
    return model

def trainer(model, optimizer):
    def train(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()
    return train
"""


def run(body: str) -> None:
    command = [sys.executable, "-c", DOUBLE + textwrap.dedent(body)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]


def test_graphs_are_torch_tpus_whatever_is_asked_for_and_other_tensors_are_not() -> None:
    run(
        """
        eager = nn.Linear(3, 2)
        model = on_tpu(eager)
        asked = "openxla", dynamo_backends.compiler("openxla", device="tpu"), "inductor_freezing"
        for count, name in enumerate(asked, 1):
            torch._dynamo.reset()
            model.zero_grad()
            x = torch.randn(4, 3)
            result = torch.compile(model, backend=name)(Tpu(x))
            assert type(result) is Tpu
            torch.testing.assert_close(result.raw, eager(x))
            result.sum().backward()
            assert type(model.weight.grad) is Tpu
            torch.testing.assert_close(model.weight.grad.raw, x.sum(0).expand(2, 3))
            assert len(backend.graphs) == count

        torch._dynamo.reset()
        compiled = torch.compile(lambda x: x.sin(), backend="openxla")
        for size in (3, 4, 5):
            x = torch.randn(size)
            torch.testing.assert_close(compiled(Tpu(x)).raw, x.sin())
        torch._dynamo.reset()
        dynamic = torch.compile(lambda x: x.sin(), backend="openxla", dynamic=True)
        text = raised(lambda: dynamic(Tpu(torch.randn(3))))
        assert "TPU backend does not support torch.compile(..., dynamic=True" in text, text

        torch._dynamo.reset()
        backend.graphs.clear()
        x = torch.randn(3)
        found = torch.compile(lambda x: x.sin(), backend="openxla")(x)
        torch.testing.assert_close(found, x.sin())
        assert not backend.graphs
        """
    )


def test_whole_steps_are_refused_and_parts_are_torch_tpus() -> None:
    run(
        """
        eager = nn.Linear(3, 2)
        model = on_tpu(eager)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, eager)]
        train = trainer(model, optimizers[0])
        step = dynamo_backends.compile_step(train, model=model, optimizer=optimizers[0])
        x = torch.randn(4, 3)
        text = raised(lambda: step(Tpu(x)))
        assert "the device 'tpu' of torch_tpu, which whole steps do not support" in text, text
        assert 'fallback="split"' in text

        parts = dynamo_backends.compile_step(
            train, model=model, optimizer=optimizers[0], fallback="split"
        )
        expected = trainer(eager, optimizers[1])
        for _ in range(3):
            torch.testing.assert_close(parts(Tpu(x)).raw, expected(x))
        assert parts.is_split
        assert backend.graphs
        torch.testing.assert_close(model.weight.raw, eager.weight.detach())
        """
    )


def test_its_tensors_are_not_copied_silently_nor_its_tpu_opened_again() -> None:
    run(
        """
        import jax

        def no_devices(**_):
            raise RuntimeError("planted")

        jax.local_devices = no_devices
        x = torch.randn(3)
        on_tpu_by_option = torch.compile(
            lambda x: x.sin(), backend="openxla", options={"device": "tpu", "fallback": "error"}
        )
        for call in (lambda: to_device(x, "tpu"), lambda: on_tpu_by_option(x)):
            before = raised(call)  # nobody holds it, and there is none
            assert "XLA finds no tpu device here (planted)" in before, before
        Tpu(x)
        for call in (lambda: to_device(x, "tpu"), lambda: on_tpu_by_option(x)):
            text = raised(call)
            assert "torch_tpu uses the device 'tpu' in this process" in text, text
            assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in text

        x = Tpu(torch.randn(3))
        for values in (x, [x], {"x": x}, on_tpu(nn.Linear(2, 2))):
            for device in ("tpu:0", "cpu"):
                text = raised(lambda: to_device(values, device))
                said = "to_device was called with tensors on the device 'tpu' of torch_tpu"
                assert said in text, text
                assert "tensor.cpu()" in text and repr(device) in text
        """
    )


REAL = """
import torch, torch_tpu
import dynamo_backends
from torch._subclasses import FakeTensorMode
from dynamo_backends.runtime.foreign_devices import refuse_taken

refuse_taken("tpu")  # as long as nobody has used it
torch_tpu._loader._init_device("tpu")
refuse_taken("tpu")
backend, given = torch._dynamo.lookup_backend("tpu"), []
kind = type(backend)
kind.__call__ = lambda self, graph, inputs, **named: given.append((inputs, named)) or graph
with FakeTensorMode():
    x = torch.empty(2, 3, device="tpu")
    graph = torch.fx.symbolic_trace(torch.nn.Sigmoid())
    assert dynamo_backends.compiler("openxla")(graph, [x]) is graph
assert given == [([x], {})]
assert torch.compile(torch.sigmoid, backend="openxla")(torch.zeros(3)).tolist() == [0.5] * 3
"""


@pytest.mark.skipif(find_spec("torch_tpu") is None, reason="torch_tpu is not installed")
def test_the_package_itself_is_found_and_handed_graphs() -> None:
    """Without a TPU, too: its backend needs one only to compile."""
    done = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
