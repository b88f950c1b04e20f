"""`warm_up`: afterwards nothing compiles, and nothing but compiled code is left of it."""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends import _torch_private as private
from dynamo_backends.interface.counters import total
from dynamo_backends.interface.errors import OptionError
from dynamo_backends.interface.registry import get_backend
from dynamo_backends.pipeline import background
from dynamo_backends.workers.memory import resident


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return self.head(
            nn.functional.dropout(self.norm(self.linear(x)).relu(), 0.5, self.training)
        )


def captured() -> int:
    return int(private.dynamo_counters()["stats"]["unique_graphs"])


ANY = range(2, 65)
SEEN = (2, 5, 16, 64)

SERVERS: dict[str, tuple[str, dict[str, Any], Sequence[int]]] = {
    "onnxrt": ("onnxrt", {}, ANY),
    "onnxrt, nobody waits": ("onnxrt", {"while_compiling": "eager"}, ANY),
    "ov": ("ov", {}, ANY),
    "inductor_freezing": ("inductor_freezing", {}, ANY),
    "inductor_freezing, nobody waits": (
        "inductor_freezing",
        {"while_compiling": "eager"},
        ANY,
    ),
    "openxla, padded": ("openxla", {"buckets": [64], "exact_after": 1_000_000}, ANY),
    "openxla, exact": ("openxla", {}, SEEN),
}
"""A backend, its options, and the sizes of calls."""


@pytest.mark.parametrize("name", SERVERS)
def test_calls_inside_the_range_compile_nothing(name: str):
    backend, options, sizes = SERVERS[name]
    available = get_backend(backend).availability()
    if not available.usable:
        pytest.skip(available.reason)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 512), nn.ReLU(), nn.Linear(512, 512)).eval()
    compiled = torch.compile(model, backend=backend, options=options)
    wrong: list[Any] = []

    def serve(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _ in range(125):
                size = sizes[int(torch.randint(len(sizes), (), generator=generator))]
                x = torch.randn(size, 6, generator=generator)
                if not torch.allclose(compiled(x), model(x), atol=1e-4):
                    wrong.append((seed, size))

    with torch.no_grad():
        done = dynamo_backends.warm_up(compiled, [(torch.zeros(n, 6),) for n in SEEN])
    assert done.complete
    assert done.graphs >= 1
    assert done.executables >= 1
    for _ in range(2):  # so that malloc has what threads need
        in_threads(serve, range(8))
    before, memory = (captured(), total.compilations, total.executables), resident()
    in_threads(serve, range(8, 16))
    assert not wrong
    assert before == (captured(), total.compilations, total.executables)
    assert resident() - memory < 40 << 20, "the results of all calls are more than 64 MB"


def in_threads(serve: Callable[[int], None], seeds: Sequence[int]) -> None:
    with ThreadPoolExecutor(len(seeds)) as pool:
        list(pool.map(serve, seeds))


@pytest.mark.parametrize("meanwhile", ["wait", "eager"])
def test_nothing_else_is_left(meanwhile: str):
    torch.manual_seed(3)
    random.seed(3)
    model = Net().train()
    compiled = torch.compile(model, backend="onnxrt", options={"while_compiling": meanwhile})
    state = {name: value.clone() for name, value in model.state_dict().items()}
    generators = torch.get_rng_state(), random.getstate()
    x = torch.ones(4, 6)
    done = dynamo_backends.warm_up(compiled, [{"x": x}, (torch.ones(7, 6),), torch.ones(9, 6)])
    assert done.complete
    assert torch.equal(generators[0], torch.get_rng_state())
    assert generators[1] == random.getstate()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(x, torch.ones(4, 6))
    before = captured(), total.compilations
    compiled(x).sum().backward()
    assert before == (captured(), total.compilations), "the backward graph was compiled, too"


def test_inputs_that_are_written_to_are_as_before():
    compiled = torch.compile(lambda x: x.add_(1) * 2, backend="onnxrt")
    x = torch.zeros(3)
    dynamo_backends.warm_up(compiled, [x])
    assert torch.equal(x, torch.zeros(3))


def test_what_inputs_are():
    with pytest.raises(OptionError, match=r"takes a list with the arguments of each call"):
        dynamo_backends.warm_up(torch.relu, torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"a tuple of positional arguments, .* not 3 \(int\)"):
        dynamo_backends.warm_up(torch.relu, [3])  # type: ignore[list-item]


def test_explain_counts_what_served_the_calls():
    with dynamo_backends.Explainer(
        lambda x: (x * 2).relu().sum(1), backend="onnxrt", dynamic=True
    ) as call:
        for size in (3, 4, 5, 6, 7):
            call(torch.randn(size, 2 * size + 1))
    explanation = call.explanation()
    (report,) = explanation.reports
    assert [(row.by, row.calls) for row in report.served] == [("ranged", 5)]
    assert set(report.symbols.values()) == {"from 2"}
    text = str(explanation)
    assert "ranged" in text
    assert "from 2" in text
    assert explanation.to_dict()["graphs"][0]["reports"][0]["served"][0]["calls"] == 5


def test_explain_tells_exact_programs_apart():
    with dynamo_backends.Explainer(
        lambda x: x * 2 + 1, backend="onnxrt", dynamic=True, options={"ranges": False}
    ) as call:
        for size in (3, 4, 3):
            call(torch.randn(size))
    (report,) = call.explanation().reports
    assert [(r.by, r.shapes, r.calls) for r in report.served] == [
        ("exact", ("x: float32[3]",), 2),
        ("exact", ("x: float32[4]",), 1),
    ]


def test_coverage_counts_what_served_the_calls():
    compiled = torch.compile(lambda x: x.sin() * 2, backend="onnxrt", dynamic=True)
    with dynamo_backends.coverage() as found:
        for size in (3, 4, 5):
            compiled(torch.randn(size))
    assert [(row.by, row.calls) for row in found.served] == [("ranged", 3)]
    assert "ranged" in str(found)
    assert found.to_dict()["served"][0]["calls"] == 3


def test_coverage_of_calls_while_compiling():
    options = {"while_compiling": "eager"}
    compiled = torch.compile(lambda x: x.sin() * 3, backend="onnxrt", options=options)
    with dynamo_backends.coverage() as found:
        compiled(torch.randn(3))
        assert background.wait_until_idle(60)
        compiled(torch.randn(3))
    assert [(row.by, row.calls) for row in found.served] == [("eager while compiling", 1)]
