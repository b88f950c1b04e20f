"""Narrow integers on Inductor's backends: extrema, and what overflows, are eager's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends

FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "amin": lambda x: x.amin(1),
    "amax": lambda x: x.amax(0, keepdim=True),
    "amin of all": lambda x: x.amin(),
    "min": lambda x: x.min(),
    "max": lambda x: x.max(),
    "min along a dimension": lambda x: tuple(x.min(1)),
    "max along a dimension": lambda x: tuple(x.max(1)),
    "aminmax": lambda x: tuple(x.aminmax(dim=1)),
    "argmin": lambda x: x.argmin(1),
    "argmax": lambda x: x.argmax(1),
    "argmax of all": lambda x: x.argmax(),
    "abs": lambda x: x.abs().to(torch.int64),
    "abs of a column": lambda x: x[..., -1].abs().to(torch.int32),
    "abs in an extremum": lambda x: x.abs().amin(1),
    "negated": lambda x: (-x).relu(),
    "products": lambda x: (x * x).to(torch.int64),
    "sums": lambda x: (x[..., -1] + x[..., 0]).to(torch.int64),
    "cumulative extremum": lambda x: tuple(x.cummax(1)),
}
DTYPES = (torch.int8, torch.uint8, torch.int16)


def contents(dtype: torch.dtype) -> list[list[int]]:
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    negative = [[-3, -7], [least, 0, most, 1]] if least else []
    return [[least], [most], [1, 5], *negative]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_eagers(name: str, dynamic: bool):
    function = FUNCTIONS[name]
    options = {"verify": "off", "min_block_size": 1}
    compiler = dynamo_backends.compiler("inductor_freezing", **options)
    for dtype in DTYPES:
        torch._dynamo.reset()
        compiled = torch.compile(function, backend=compiler, dynamic=dynamic)
        for shape in ((3, 16), (3, 67)):
            for numbers in contents(dtype):
                values = torch.tensor(numbers, dtype=dtype)
                x = values[torch.arange(shape[0] * shape[1]) % len(values)].view(shape)
                with torch.no_grad(), dynamo_backends.record() as reports:
                    result = compiled(x)
                torch.testing.assert_close(result, function(x), rtol=0, atol=0, equal_nan=True)
                assert not any(report.fallbacks for report in reports)


def test_steps_compute_what_eager_does():
    x = torch.full((3, 16), 5, dtype=torch.int8)
    results = []
    for compiled in (False, True):
        model = nn.Linear(1, 1).double()
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train(x: Tensor, model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
            loss = model(x.amin(1, keepdim=True).double()).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = train
        if compiled:
            step = dynamo_backends.compile_step(
                train, model=model, optimizer=optimizer, backend="inductor"
            )
        results.append([step(x).item() for _ in range(3)])
    assert results[1] == pytest.approx(results[0], rel=1e-12, abs=1e-14)
    assert results[0][0] == 5
