"""One executable of a vendor for all sizes of a range, compared with eager at every call."""

import gc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dynamo_backends
from dynamo_backends import GraphReport
from dynamo_backends.conformance.traffic import FUNCTIONS, MODELS, SIZES, Reader, agree
from dynamo_backends.interface.registry import get_backend
from tests.backend_checks import usable
from tests.test_ranges import PROGRAMS

NAMES = ["onnxrt", "ov", "iree", "tvm", "ts_trace", "ofi", "static_runtime"]
TRAINING = [
    pytest.param(name, marks=pytest.mark.long) if name in ("tvm", "iree") else name
    for name in NAMES
    if get_backend(name).trains
]

EAGER = {
    "ov": {"a ratio beside it"},
    "iree": {"two results and a number"},
    "static_runtime": {"positions"},
}
"""Functions of which a backend leaves something to eager: OpenVINO has no float64."""

OF_ITS_SIZES = {("iree", "filled"), ("tvm", "filled"), ("tvm", "padded")}
"""Functions of which an executable is made for each size: TVM pads by numbers that it knows, and a
graph that holds for two rows alone, because one of its sizes is 2, is told from others."""

OF_ONE_SIZE = {
    ("onnxrt", "seer"),
    ("ov", "reader"),
    ("ov", "seer"),
    ("iree", "reader"),
    ("iree", "seer"),
    ("tvm", "reader"),
    ("tvm", "seer"),
}
"""Models whose training takes an executable for each size: what gradients of pools are decomposed
into assumes that sizes are not 1, what they are of may have no elements, and others get indices
along or compared with a size."""


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return usable(request.param)


@pytest.fixture(autouse=True)
def many_recompilations() -> Iterator[None]:
    with torch._dynamo.config.patch(recompile_limit=64):
        yield


def compiled(fn: Any, name: str, **settings: Any) -> Callable[..., Any]:
    settings = {"cache": False, "min_block_size": 1, "verify": "always"} | settings
    return torch.compile(fn, backend=dynamo_backends.compiler(name, **settings), dynamic=True)


def executables(reports: Sequence[GraphReport]) -> int:
    """How many were made; and nothing failed, or was wrong, when it ran."""
    assert [f for r in reports for f in r.runtime_fallbacks] == []
    return sum(r.executables for r in reports)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_one_executable_serves_all_sizes(name: str, function: str):
    run = compiled(FUNCTIONS[function], name)
    with dynamo_backends.record() as reports, torch.no_grad():
        for size in SIZES:
            x = torch.randn(size)
            agree(run(x), FUNCTIONS[function](x))
    made, in_eager = executables(reports), any(r.ops_in_eager for r in reports)
    assert in_eager == (function in EAGER.get(name, ()))
    most = len(SIZES) if (name, function) in OF_ITS_SIZES else PROGRAMS.get(function, 1)
    assert made <= most or in_eager


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("freezing", ["off", "probe"])
def test_models(name: str, model: str, freezing: str):
    make, inputs = MODELS[model][0], MODELS[model][1]()
    module = make().eval()
    run = compiled(module, name, freezing=freezing)
    with dynamo_backends.record() as reports, torch.no_grad():
        for x in inputs:
            agree(run(x), module(x))
        for x in reversed(inputs):
            agree(run(x), module(x))
    assert executables(reports) == sum(r.blocks for r in reports)


def test_weights_that_change_between_sizes(name: str):
    module = Reader().eval()
    run = compiled(module, name)
    with dynamo_backends.record() as reports, torch.no_grad():
        for x in MODELS["reader"][1]():
            for _ in range(2):
                agree(run(x), module(x))
                module.bias.add_(0.5)
                module.head.weight.mul_(-0.5)
    assert executables(reports) == sum(r.blocks for r in reports)


@pytest.mark.parametrize("name", TRAINING)
@pytest.mark.parametrize("model", MODELS)
def test_gradients(name: str, model: str):
    make, inputs = MODELS[model][0], MODELS[model][1]()
    module, reference = (make() for _ in range(2))
    reference.load_state_dict(module.state_dict())
    run = compiled(module, usable(name))
    with dynamo_backends.record() as reports:
        for x in inputs:
            for each, call in ((module, run), (reference, reference)):
                each.zero_grad()
                call(x).square().mean().backward()
            for mine, right in zip(module.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, right.grad, rtol=1e-4, atol=1e-5)
    assert {r.kind for r in reports} >= {"forward", "backward"}
    served = executables(reports) == sum(r.blocks for r in reports)
    assert served == ((name, model) not in OF_ONE_SIZE)


class Attending(nn.Module):
    """Attention by torch's own function, of a few projections."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.project = nn.Embedding(50, 16), nn.Linear(16, 3 * 16)

    def forward(self, tokens: Tensor) -> Tensor:
        heads = self.project(self.embedding(tokens)).unflatten(-1, (6, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(*heads.chunk(3, 1)).sum(2)


@pytest.mark.parametrize("name", ["onnxrt", pytest.param("ov", marks=pytest.mark.long)])
def test_attention_is_trained_by_one_executable(name: str):
    """What attention is decomposed into has sizes among its arguments."""
    module, reference = Attending(), Attending()
    reference.load_state_dict(module.state_dict())
    run = compiled(module, usable(name))
    with dynamo_backends.record() as reports:
        for length in (5, 9, 4):
            x = torch.randint(50, (3, length))
            for each, call in ((module, run), (reference, reference)):
                each.zero_grad()
                call(x).square().mean().backward()
            for mine, right in zip(module.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, right.grad, rtol=1e-4, atol=1e-5)
    attention = {f.op for r in reports for f in r.fallbacks if "attention" in f.op}
    assert attention == set()
    assert executables(reports) == sum(r.blocks for r in reports)


def test_not_a_number(name: str):
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return (x * 2).exp() / x.shape[0], x.sum(1), x.t() @ x + x.shape[1]

    run = compiled(f, name)
    with dynamo_backends.record() as reports, torch.no_grad():
        for size in SIZES:
            x = torch.randn(size)
            x[0, 0], x[1, -1] = torch.nan, torch.inf
            agree(run(x), f(x))
    assert executables(reports) == sum(r.blocks for r in reports)


def test_a_part_in_eager_gets_the_sizes(name: str):
    def f(x: Tensor) -> Tensor:
        y = x.t().contiguous().tanh()
        z = y.t().sigmoid() + torch.arange(x.shape[1], dtype=torch.float32)
        return z.repeat(2, 1) * x.shape[0]

    run = compiled(f, name, keep_in_eager=("sigmoid",))
    with dynamo_backends.record() as reports, torch.no_grad():
        for size in SIZES:
            x = torch.randn(size)
            agree(run(x), f(x))
    assert all(r.ops_in_eager and r.blocks == 2 for r in reports)
    assert executables(reports) == sum(r.blocks for r in reports)


def test_threads_with_sizes_of_their_own(name: str):
    module = Reader().eval()
    run = compiled(module, name, verify="first")

    def work(seed: int) -> None:
        sizes = torch.randint(2, 30, (12, 2), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            for batch, length in sizes.tolist():
                x = torch.randint(50, (batch, length))
                torch.testing.assert_close(run(x), module(x))

    with dynamo_backends.record() as reports:
        work(0)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(1, 9)))
    assert executables(reports) == sum(r.blocks for r in reports)


def test_slices_end_where_sizes_say(name: str):
    def f(x: Tensor) -> tuple[Tensor, ...]:
        rows, columns = x.shape
        return x[1 : rows // 2 + 1] * 2, x[:, : columns // 2 + 1 : 3].sin(), x[:, 1 : rows + 1] + 1

    run = compiled(f, name)
    with dynamo_backends.record() as reports, torch.no_grad():
        for size in ((3, 8), (5, 12), (4, 6), (9, 14), (12, 40), (3, 5)):
            x = torch.randn(size)
            agree(run(x), f(x))
    assert not any(r.ops_in_eager for r in reports)
    assert executables(reports) <= 2


def test_results_are_the_callers(name: str):
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return x + 1, x.view(-1), x.sum(0)

    run = compiled(f, name)
    kept, expected = [], []
    with torch.no_grad():
        for size in (*SIZES, *SIZES):
            x = torch.randn(size)
            kept.append(run(x))
            expected.append([y.clone() for y in f(x)])
    agree(kept, [tuple(e) for e in expected])


@pytest.mark.parametrize("name", ["onnxrt", "ov"])
def test_the_disk_cache_has_one_entry_for_all_sizes(name: str):
    made = []
    for sizes in (((3, 8), (5, 12)), ((9, 2), (64, 10), (3, 8))):
        torch._dynamo.reset()
        gc.collect()
        module = nn.Sequential(nn.Linear(4, 3), nn.Flatten(1), nn.Sigmoid()).eval()
        run = compiled(module, usable(name), cache=True)
        with dynamo_backends.record() as reports, torch.no_grad():
            for size in sizes:
                x = torch.randn(*size, 4)
                agree(run(x), module(x))
        made.append((executables(reports), sum(r.cache_hits for r in reports)))
        del run, reports  # or its program is used, and nothing is looked for on disk
    assert made == [(1, 0), (1, 1)]


@pytest.mark.parametrize("depends_on_ranges", [True, False])
def test_the_disk_cache_tells_ranges_apart(
    depends_on_ranges: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(get_backend(usable("onnxrt")), "depends_on_ranges", depends_on_ranges)
    made = []
    for most in (32, 32, 64):
        torch._dynamo.reset()
        gc.collect()
        x = torch.randn(5, 4)
        torch._dynamo.mark_dynamic(x, 0, min=2, max=most)
        run = compiled(torch.sigmoid, usable("onnxrt"), cache=True)
        with dynamo_backends.record() as reports:
            agree(run(x), x.sigmoid())
        made.append((executables(reports), sum(r.cache_hits for r in reports)))
        del run, reports
    assert made == [(1, 0), (1, 1), (1, 0) if depends_on_ranges else (1, 1)]


def test_what_may_have_no_elements_is_compiled_for_its_sizes(name: str):
    def f(x: Tensor) -> Tensor:
        return x.exp()[2:].sigmoid().sum(0)

    run = compiled(f, name)
    with dynamo_backends.record() as reports, torch.no_grad():
        for size in (3, 5, 2, 40, 4):
            x = torch.randn(size, 4)
            agree(run(x), f(x))
    executables(reports)
