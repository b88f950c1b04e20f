"""What makes a block wrong is found by compiling parts of it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest
import torch
from torch import Tensor

import dynamo_backends
from dynamo_backends.cli.main import main
from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface.executable import Executable
from dynamo_backends.verify.bisection import smallest_wrong_region
from dynamo_backends.xla.lowering import registry
from tests.verification.test_doubt import traced

aten = torch.ops.aten


def chain(x: Tensor) -> tuple[Tensor, ...]:
    y = (x * 2 + 1).tanh()
    z = y.exp() - y
    return (z * z).sum(0), y.cos() + z


class Wrong(Executable):
    """Eager, but wrong where some operators are compiled together.

    Args:
        graph: The part.
        culprits: The operators.
    """

    def __init__(self, graph: Graph, culprits: Sequence[Any]):
        self._module = graph.module
        targets = [node.target for node in graph.calls]
        self._factor = 1.5 if all(c in targets for c in culprits) else 1.0

    def bind(self, weights: Sequence[Tensor]) -> Any:
        return lambda given: [r * self._factor for r in self._module(*given)], ()


@pytest.mark.parametrize(
    ("culprits", "names"),
    [
        ([aten.tanh.default], "aten.tanh.default"),
        ([aten.mul.Tensor], "aten.mul.Tensor"),
        ([aten.cos.default], "aten.cos.default"),
        (
            [aten.tanh.default, aten.sub.Tensor],
            "aten.tanh.default and then aten.exp.default and then aten.sub.Tensor",
        ),
    ],
)
def test_the_smallest_region_is_found(culprits: list[Any], names: str):
    x = torch.randn(4, 3)
    compiled: list[int] = []

    def compile_part(graph: Graph) -> Executable:
        compiled.append(len(graph.calls))
        return Wrong(graph, culprits)

    found = smallest_wrong_region(traced(chain, x), compile_part, (x,))
    assert found is not None
    assert found.startswith(f"{names}")
    assert found.removeprefix(names).lstrip(", at").count("and then") == 0
    assert "output 0 differs from eager by up to" in found
    assert len(compiled) <= 9, "halving takes few compilations"


def test_what_is_right_in_all_parts_is_nobodys_fault():
    x = torch.randn(4, 3)
    assert smallest_wrong_region(traced(chain, x), lambda g: Wrong(g, [aten.sin]), (x,)) is None


def test_parts_that_cannot_be_compiled_are_passed_over():
    x = torch.randn(4, 3)

    def compile_part(graph: Graph) -> Executable:
        if len(graph.calls) < 3:
            raise RuntimeError("too small")
        return Wrong(graph, [aten.tanh.default])

    found = smallest_wrong_region(traced(chain, x), compile_part, (x,))
    assert found is not None
    assert "aten.tanh.default" in found


@pytest.fixture
def wrong_tanh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lowering of tanh that is one thousandth off."""
    __import__("dynamo_backends.xla.lowering")
    op = aten.tanh.default
    row = registry.lookup(op)
    assert row is not None
    wrong = replace(row, fn=lambda x: jnp.tanh(x) * jnp.float32(1.001))
    monkeypatch.setitem(registry._TABLE, op, wrong)


@pytest.mark.plants_errors
@pytest.mark.usefixtures("wrong_tanh")
@pytest.mark.parametrize("bisect", [False, True])
def test_explain_names_the_operator_on_request(bisect: bool):
    explanation = dynamo_backends.explain(
        chain, torch.randn(4, 3), options={"cache": False}, bisect=bisect
    )
    (report,) = explanation.reports
    (text,) = report.runtime_fallbacks
    where = "the smallest wrong part: aten.tanh.default, at "
    assert (where in text) == bisect
    assert ("y = (x * 2 + 1).tanh(): output 0 differs" in text) == bisect
    assert text.split(" ")[0] == "openxla"
    assert "fell back at run time: openxla computed a wrong result" in str(explanation)


MODEL = """
import torch
from torch import nn

def make():
    return nn.Sequential(nn.ReLU(), nn.Tanh(), nn.Sigmoid()), (torch.randn(5),)
"""


@pytest.mark.plants_errors
@pytest.mark.usefixtures("wrong_tanh")
def test_the_command_line_bisects(tmp_path: Any, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "model.py").write_text(MODEL)
    model = f"{tmp_path / 'model.py'}:make"
    assert main(["explain", model, "--bisect", "--json", "--option", "cache=False"]) == 0
    assert "the smallest wrong part: aten.tanh.default" in capsys.readouterr().out
