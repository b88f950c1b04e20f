"""CPU seconds of the parts of a first compiled step, for models with many parameters."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends.aot.step.program import record_program
from harness.report import table as make_table

PARAMETERS = (100, 200, 400, 1000)
PHASES = ("record", "functionalize", "passes", "compile", "rest")
TIMED = {
    "trace_record": "record",
    "functionalize": "functionalize",
    **dict.fromkeys(
        ("_PASSES", "hoist", "with_index_checks", "suppress_updates_on_error"), "passes"
    ),
}
"""Functions of `record_program`, and the part that they are of."""

LIMITS = {200: 6.0, 1000: 40.0}
"""CPU seconds that the capture, all but "compile" and "rest", may take."""

_WIDTHS = (32, 48, 64)


def net(parameters: int) -> nn.Module:
    """Blocks of two linear layers and a layer norm, six parameters each, of a few widths."""
    layers: list[nn.Module] = []
    while sum(1 for layer in layers for _ in layer.parameters()) < parameters:
        width = _WIDTHS[len(layers) % len(_WIDTHS)]
        layers.append(Block(width))
    return nn.Sequential(*layers)


class Block(nn.Module):
    """A residual block of width 64 with another width inside."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.inner = nn.Linear(64, width)
        self.outer = nn.Linear(width, 64)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of the input and what the layers make of it."""
        result: Tensor = x + self.outer(F.gelu(self.inner(self.norm(x))))
        return result


def measured(parameters: int, backend: str) -> dict[str, float]:
    """Takes two steps, of which the second one is compiled: its CPU seconds."""
    torch.manual_seed(0)
    model = net(parameters)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    x = torch.randn(4, 64)

    def train(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    seconds = dict.fromkeys(PHASES, 0.0)
    for name, phase in TIMED.items():
        function = getattr(record_program, name)
        setattr(record_program, name, _timed(seconds, phase, function))
    step: Any = dynamo_backends.compile_step(
        train, model=model, optimizer=optimizer, backend=backend
    )
    step(x)  # in eager, recorded
    compile_graph = step._state.backend.compile
    object.__setattr__(step._state.backend, "compile", _timed(seconds, "compile", compile_graph))
    start = time.process_time()
    step(x)
    seconds["rest"] = time.process_time() - start - sum(seconds.values())
    assert step.compilations == 1, step.reasons
    return seconds


def _timed(seconds: dict[str, float], phase: str, function: Callable[..., Any]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[phase] += time.process_time() - start

    return call


def capture_seconds(row: Mapping[str, float]) -> float:
    """All of it but the backend's compilation and the first run."""
    return sum(row[phase] for phase in PHASES[:3])


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One line per backend and number of parameters."""
    cells = [
        [row["backend"], str(row["parameters"]), *(f"{row[phase]:.2f}" for phase in PHASES),
         f"{capture_seconds(row):.2f}"]
        for row in rows
    ]  # fmt: skip
    heads = "backend", "parameters", *PHASES, "capture"
    return make_table(heads, cells, "CPU seconds of a first compiled step, AdamW")


def problems(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What takes longer than it may."""
    return [
        f"{row['backend']}: the capture of {row['parameters']} parameters takes "
        f"{capture_seconds(row):.1f} CPU s, more than {LIMITS[row['parameters']]:.0f}"
        for row in rows
        if capture_seconds(row) > LIMITS.get(row["parameters"], float("inf"))
    ]
