from typing import Any

import pytest
import torch
from torch import nn

from harness import compile_model, measure

X = torch.linspace(-1, 1, 8).reshape(2, 4)
DOUBLED = "bench_test_doubled"
RAISING = "bench_test_raising"


@pytest.fixture(scope="module", autouse=True)
def _backends() -> None:
    def doubled(gm: Any, inputs: Any) -> Any:
        return lambda *args: [2 * out for out in gm(*args)]

    def raising(gm: Any, inputs: Any) -> Any:
        raise RuntimeError("out of luck\nand of memory")

    torch._dynamo.register_backend(doubled, DOUBLED)
    torch._dynamo.register_backend(raising, RAISING)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh()).eval()


def test_compile_model_counts_graphs_and_time() -> None:
    class Breaks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + 1
            torch._dynamo.graph_break()
            return x * 2

    compiled = compile_model(Breaks(), (X,), "eager")
    assert compiled.graphs == 2
    assert compiled.first_call_s > 0
    assert compiled.reports == []
    assert compiled.ops_in_eager is None
    assert torch.equal(compiled.function(X), (X + 1) * 2)


def test_measure_times_right_backends_and_reports_the_others() -> None:
    steps: list[str] = []
    with torch.no_grad():
        right, wrong, failed = measure(
            model(), (X,), ["eager", DOUBLED, RAISING], name="m", rounds=3, on_step=steps.append
        )
    assert right.passed
    assert right.timing is not None
    assert right.eager is not None
    assert len(right.timing.samples) == len(right.eager.samples) == 3
    assert not wrong.passed
    assert wrong.timing is None
    assert "differs from eager by up to" in wrong.error
    assert not failed.passed
    assert failed.error == "RuntimeError: out of luck and of memory"
    assert steps == ["compile eager", f"compile {DOUBLED}", f"compile {RAISING}", *["round"] * 3]
