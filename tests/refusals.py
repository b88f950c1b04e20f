"""How backends say no: to a missing package, to wrong options, to tensors elsewhere."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import fx, nn

import dynamo_backends
from dynamo_backends import DeviceError, OptionError
from dynamo_backends._torch_private import FakeTensorMode
from dynamo_backends.graph.graph import Graph, Input, Role

_BLOCK = """
import importlib.machinery, sys
class Without(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.split(".")[0] in {names!r}:
            return None
        return super().find_spec(name, path, target)
sys.meta_path[:] = [Without if f is importlib.machinery.PathFinder else f for f in sys.meta_path]
"""

_WITHOUT = """
import torch, dynamo_backends
print(dynamo_backends.get_backend({backend!r}).availability())
backend = dynamo_backends.compiler({backend!r})
try:
    print(torch.compile(torch.nn.Sigmoid(), backend=backend)(torch.zeros(2)).tolist())
except Exception as error:
    print(error)
"""


def run(code: str, blocked: tuple[str, ...] = ()) -> str:
    """What a program prints in a process of its own, which must end well and warn of nothing.

    Args:
        code: The program.
        blocked: Names of modules that it cannot import.
    """
    code = (_BLOCK.format(names=blocked) if blocked else "") + code
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return done.stdout


def without(backend: str, packages: tuple[str, ...], then: str = "") -> str:
    """What a process without some packages says of a backend, its availability first.

    Args:
        backend: Its name; the program compiles a sigmoid with it.
        packages: Names of modules that cannot be imported.
        then: What the program does next.
    """
    return run(_WITHOUT.format(backend=backend) + then, packages)


def cause(info: pytest.ExceptionInfo[BaseException]) -> BaseException:
    """The error itself; Dynamo wraps what a backend raises."""
    error = info.value
    while (inner := getattr(error, "inner_exception", None) or error.__cause__) is not None:
        error = inner
    return error


def backend_is_refused(backend: str, text: str) -> None:
    """Asserts that it cannot run here, and that the error holds this text."""
    assert not dynamo_backends.get_backend(backend).availability().usable
    with pytest.raises(Exception, match="cannot run here") as info:
        torch.compile(nn.Sigmoid(), backend=dynamo_backends.compiler(backend))(torch.zeros(2))
    assert text in str(cause(info))


def options_are_refused(backend: str, options: dict[str, Any], text: str) -> None:
    """Asserts that an `OptionError` with this text is raised."""
    with pytest.raises(OptionError) as info:
        torch.compile(nn.Sigmoid(), backend=backend, options=options)(torch.zeros(2))
    assert text in str(info.value)


def tensor_is_refused(backend: str, device: str, text: str) -> None:
    """Asserts that a graph of one tensor on a device is refused with this text."""
    chosen = dynamo_backends.get_backend(backend)
    with pytest.raises(DeviceError, match=text):
        chosen.check_graph(graph_on(device), chosen.Options())


def graph_on(device: str) -> Graph:
    """A graph that returns its input, a fake tensor on a device."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["val"] = torch.empty(4, device=device)
    graph.output((x,))
    return Graph(fx.GraphModule(nn.Module(), graph), "inference", (Input("x", Role.ACTIVATION),))
