"""Programs that serve all smaller sizes, with the worst that padding can hold planted in it."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynamo_backends.interface.report import record
from dynamo_backends.pipeline import background
from dynamo_backends.pipeline.compiled_graph import TRAINED
from dynamo_backends.pipeline.shapes.buckets import round_up
from dynamo_backends.xla.lowering.padded import registry
from dynamo_backends.xla.lowering.padded.call import PaddedCall, elementwise
from dynamo_backends.xla.lowering.padded.extents import Factor, extents_of, reshaped
from dynamo_backends.xla.padded import executable

aten = torch.ops.aten

BAD = {"nan": math.nan, "inf": math.inf}


@pytest.fixture(autouse=True)
def many_recompilations() -> Iterator[None]:
    with torch._dynamo.config.patch(recompile_limit=64):
        yield


@pytest.fixture(autouse=True, params=BAD)
def planted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def new_padding(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        memory = torch.empty(shape, dtype=dtype, device=device)
        if dtype.is_floating_point or dtype.is_complex:
            return memory.fill_(BAD[request.param])
        return memory.fill_(True if dtype == torch.bool else torch.iinfo(dtype).max)

    monkeypatch.setattr(executable, "allocate_padded_input", new_padding)


@pytest.fixture(autouse=True)
def beside() -> Iterator[None]:
    yield
    assert background.wait_until_idle(60)


@pytest.fixture
def nothing_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are made in calls alone, so that their number is always the same."""
    monkeypatch.setattr(background, "submit_compilation", lambda mark, job, owner: None)


def compiled(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    settings = {"cache": False, "verify": "off", "fallback": "error", "min_block_size": 1}
    options = {"bucket_growth": 1.5, **options}
    return torch.compile(fn, backend="openxla", options={**settings, **options})


def varying(x: Tensor) -> Tensor:
    for dim in range(x.ndim):
        torch._dynamo.maybe_mark_dynamic(x, dim)
    return x


def agree(result: Any, expected: Any, **tolerances: float) -> None:
    torch.testing.assert_close(result, expected, equal_nan=True, **tolerances)
    leaves = torch.utils._pytree.tree_leaves
    for r, e in zip(leaves(result), leaves(expected), strict=True):
        if isinstance(e, Tensor):
            assert r.stride() == e.stride()


W = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
ORDER = torch.tensor([1, 0])
TABLE = torch.randn(9, 5, generator=torch.Generator().manual_seed(1))

FUNCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "elementwise": lambda x: (x.exp() * 2 + x).relu(),
    "sums": lambda x: (x.sum(0), x.sum(1), x.sum(), x.sum((0, 1), keepdim=True)),
    "means": lambda x: (x.mean(0), x.mean(1, keepdim=True), x.mean()),
    "product": lambda x: x.prod(1),
    "extrema": lambda x: (x.amax(0), x.amin(1), x.max(), x.min(), x.int().amax(1)),
    "any": lambda x: ((x > 0).any(0), (x > 9).any(), (x < 9).all(1), (x < 9).all()),
    "softmax": lambda x: (x.softmax(0), x.log_softmax(1)),
    "contracted": lambda x: x.t() @ x,
    "batch of products": lambda x: x[:, None, :] @ x[:, :, None],
    "rows": lambda x: F.linear(x[:, :, None] * W[0], W, W[:, 0]),
    "bias": lambda x: torch.addmm(x.sum(1)[:, None], x, x.t()),
    "layer norm": lambda x: F.layer_norm(x[:, :, None] * W[:, 0], (6,), W[:, 1], W[:, 2]),
    "rms norm": lambda x: F.rms_norm(x[:, :, None] * W[:, 0], (6,), W[:, 1]),
    "embedding": lambda x: F.embedding(x.abs().long() % 9, TABLE),
    "merged": lambda x: (x[:, :, None] * W[0]).reshape(-1, 5).exp().mean(0),
    "merged and split": lambda x: ((x[:, :, None] * W[0]).view(-1, 5) @ W.t()).view(*x.shape, 6),
    "merged result": lambda x: (x * 2).reshape(-1),
    "merged mean": lambda x: x.reshape(-1).softmax(0).sum() + x.reshape(-1).mean(),
    "spread": lambda x: x.sum(0, keepdim=True).expand(x.shape[0], -1) * 2,
    "positions": lambda x: x + torch.arange(x.shape[1]) / 2,
    "causal": lambda x: (torch.arange(x.shape[1])[:, None] >= torch.arange(x.shape[1])) * x.sum(),
    "filled": lambda x: x + x.new_ones(x.shape[0], 1) + torch.zeros(x.shape[1]),
    "divided": lambda x: x.sum(0) / x.shape[0],
    "of ratios": lambda x: (x * (1 / x.shape[0]), x + x.numel() / (x.numel() + 1), x / 2.5**0.5),
    "last": lambda x: (x[:, -1], x[-1], x[0], x[:, 1]),
    "cut": lambda x: (x[:, 1:] + 1, x[:-1] * 2, x[::2] - 1),
    "ends": lambda x: (x[:, -1:] + 1, x[-2:] * 2, x[:, -2:-1] - 1),
    "numbers": lambda x: (x.long() + x.shape[0], torch.arange(x.shape[1]) * 2 < x.shape[0]),
    "read": lambda x: (x[:, torch.tensor([0, -1])], x[torch.tensor([1, -2])]),
    "transposed": lambda x: (x.t() + 1, x.t().contiguous() * 2),
    "joined": lambda x: torch.cat([x[:, :, None], x[:, :, None] * W[0]], 2).sum((0, 1)),
    "stacked": lambda x: torch.stack([x, x * 2], 1).mean(0),
    "parts": lambda x: [p * 2 for p in (x[:, :, None] * W[0]).split(2, -1)],
    "variances": lambda x: (x.var(0), x.std(1, correction=0), *torch.var_mean(x, (0, 1))),
    "places": lambda x: (x.argmax(0), x.argmin(1), *x.max(1), *x.min(0)),
    "cumulative": lambda x: (x.cumsum(0), x.sigmoid().cumprod(1), x.logcumsumexp(0), *x.cummax(1)),
    "merged and cumulative": lambda x: x.reshape(-1).cumsum(0),
    "sorted": lambda x: (*x.sort(0), *x.sort(dim=1, descending=True, stable=True), x.argsort(0)),
    "best": lambda x: (*x.topk(2, 0), *x.topk(2, 1, largest=False)),
    "norms": lambda x: (x.norm(dim=0), x.norm(1), x.logsumexp(1)),
    "exponents of integers": lambda x: (
        (x > 0).logsumexp(1),
        (x.int() - 125).to(torch.int8).logsumexp(0),
        x.abs().to(torch.uint8).logsumexp((0, 1), keepdim=True),
    ),
    "joined along": lambda x: (torch.cat([x, x * 2, x[1:]]), torch.cat([x, W[:1, :1] + x], 1)),
    "turned": lambda x: (x.flip(0), x.flip(0, 1)),
    "rolled": lambda x: (x.roll(1, 0), x.roll((1, -3), (0, 1)), x.roll(x.shape[1] // 2, 1)),
    "repeated": lambda x: (x.repeat(2, 3).sum(1), x[:1].repeat(x.shape[0], 2), x.repeat(2, 1, 1)),
    "triangles": lambda x: (x.tril(), x.triu(1)),
    "gathered": lambda x: (x.gather(0, x[:1].long().abs() % 2), x.index_select(1, ORDER)),
    "scattered": lambda x: torch.zeros(x.shape[0], 9).scatter(1, x[:, :1].long().abs() % 9, 1.0),
    "rows written": lambda x: (
        torch.zeros(9, x.shape[1]).index_put((torch.arange(x.shape[0]) - 3,), x),
        x.index_put((torch.tensor([1, -2]),), x[:2] + 1),
        torch.ones(9).index_put((x[:, 0].long().abs() % 9,), x[:, 1], accumulate=True),
    ),
    "padded": lambda x: F.pad(x[:, :, None] * W[0], (1, 2)).sum(1),
    "infinite": lambda x: (x / 0).nan_to_num(0.0, 5.0, -5.0).softmax(0) + (x / 0).amax(0),
}

SIZES = ((6, 7), (3, 8), (8, 5), (8, 8), (2, 3))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_program_serves_smaller_sizes(name: str):
    with record() as reports:
        run = compiled(FUNCTIONS[name], exact_after=100, bucket_growth=8.0)
        for size in SIZES:
            x = varying(torch.randn(size))
            agree(run(x), FUNCTIONS[name](x))
    assert {r.exact for r in reports} == {""}
    assert all(r.executables <= 2 for r in reports)


ORDERED: dict[str, Callable[[Tensor], Any]] = {
    "ascending": lambda x: tuple(torch.sort(x, dim=1, stable=True)),
    "descending": lambda x: tuple(torch.sort(x, dim=1, descending=True, stable=True)),
    "largest": lambda x: x.topk(3, 1).values,
    "smallest": lambda x: x.topk(3, 1, largest=False).values,
    "places": lambda x: (x.argmax(1), x.argmin(1)),
    "extrema": lambda x: (*x.max(1), *x.min(1)),
}


def with_bounds(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Numbers that repeat, among them what is put into the padding."""
    x = torch.arange(rows * columns).remainder(5).view(rows, columns).to(dtype)
    if dtype.is_floating_point:
        x[0], x[1], x[2, :2], x[2, 2] = -math.inf, math.inf, math.nan, -math.inf
    else:
        info = torch.iinfo(dtype)
        x[0, 1:3], x[1, 0], x[1, 2], x[2] = info.max, info.min, info.min, info.max
    return varying(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("name", ORDERED)
def test_padding_stays_behind_its_equals(name: str, dtype: torch.dtype):
    with record() as reports:
        run = compiled(ORDERED[name], exact_after=100, bucket_growth=8.0)
        for size in ((6, 7), (3, 8), (4, 5)):
            x = with_bounds(*size, dtype)
            agree(run(x), ORDERED[name](x))
    assert {r.exact for r in reports} == {""}


class Layer(nn.Module):
    """A transformer's layer, by its own projections."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.feed = nn.Sequential(nn.Linear(width, 20), nn.GELU(), nn.Linear(20, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, -1)
        q, k, v = (t.view(shape).transpose(1, 2) for t in self.project(x).chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = self.norms[0](x + self.out(seen.transpose(1, 2).reshape(batch, length, width)))
        return self.norms[1](x + self.feed(x))


class Encoder(nn.Module):
    """Texts of any number and length to a vector each."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, 12), nn.Embedding(40, 12)
        self.layer = Layer(12, 3)

    def forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        x = self.layer(x, mask[:, None, None])
        weights = mask[:, :, None].to(x.dtype)
        return (x * weights).sum(1) / weights.sum(1), x


def texts(batch: int, length: int) -> tuple[Tensor, Tensor]:
    mask = torch.rand(batch, length) > 0.3
    mask[:, 0] = True
    return varying(torch.randint(50, (batch, length))), varying(mask)


TEXTS = ((3, 9), (4, 12), (2, 10), (3, 5), (6, 30))


@pytest.mark.usefixtures("nothing_beside")
def test_an_encoder_with_texts_of_any_number_and_length():
    model = Encoder().eval()
    with record() as reports, torch.no_grad():
        run = compiled(model, verify="always")
        for size in TEXTS:
            given = texts(*size)
            agree(run(*given), model(*given))
    (report,) = reports
    assert not report.exact
    assert not report.events
    assert report.executables == 2, "one for up to 4 texts of 16, one for up to 8 of 32"


GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "loss": lambda x: F.cross_entropy(x @ x.t(), torch.zeros(x.shape[0], dtype=torch.int64)),
    "last": lambda x: x[:, -1].square().sum() + x[-1].exp().sum(),
    "cut": lambda x: (x[:, 1:] * x[:, :-1]).square().sum(),
    "deviation": lambda x: (x.softmax(1).square() * x.log_softmax(0)).mean(0).sum(),
    "norm": lambda x: F.layer_norm(x[:, :, None] * W[0], (5,), W[1]).pow(3).mean(),
    "products": lambda x: (x.t() @ x).tanh().mean() + x.cumsum(0).square().mean(),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_what_is_trained_is_compiled_for_each_set_of_sizes(name: str):
    fn = GRADIENTS[name]
    with record() as reports:
        run = compiled(fn, bucket_growth=8.0)
        for size in ((6, 7), (3, 8)):
            x = varying(torch.randn(size).requires_grad_())
            y = x.detach().clone().requires_grad_()
            run(x).backward()
            fn(y).backward()
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-5)
    assert {(r.kind, r.exact) for r in reports} == {("forward", TRAINED), ("backward", TRAINED)}
    assert {served.by for r in reports for served in r.executable.served} == {"exact"}
    assert [len(r.compilations) for r in reports] == [2, 2]


def test_an_operator_that_says_nothing_makes_a_graph_exact(caplog: pytest.LogCaptureFixture):
    fn = lambda x: x.median(0).values * 2  # noqa: E731
    with record() as reports, caplog.at_level(logging.INFO, "dynamo_backends"):
        run = compiled(fn)
        for size in ((3, 5), (4, 6)):
            x = varying(torch.randn(size))
            agree(run(x), fn(x))
    (report,) = reports
    assert report.exact == "aten.median.dim: it has no rule for padded inputs"
    assert report.executables == 2
    assert "sizes are not padded: aten.median.dim" in caplog.text


@pytest.mark.plants_errors
@pytest.mark.usefixtures("nothing_beside")
def test_the_first_call_of_new_sizes_finds_a_wrong_rule(monkeypatch: pytest.MonkeyPatch):
    def wrong(call: PaddedCall) -> Any:
        return call.run(), call["self"].without([0])

    row = registry.PaddingRuleEntry(wrong, frozenset())
    monkeypatch.setitem(registry._RULES, "sum.dim_IntList", row)
    fn = lambda x: x.sum(0) * 2  # noqa: E731
    with record() as reports:
        run = compiled(fn, verify="first", fallback="eager")
        for size in ((8, 4), (7, 4), (6, 3)):
            x = varying(torch.randn(size))
            agree(run(x), fn(x))
    (report,) = reports
    assert len(report.events) == 1
    assert report.verified >= 1, "of the bounds themselves it is right"


def test_sizes_that_are_seen_often_get_an_executable_of_their_own():
    fn = lambda x: x.relu() + 1  # noqa: E731
    with record() as reports:
        run = compiled(fn, exact_after=2)
        made = []
        for size in ((7, 7), (7, 7), (7, 7), (7, 7), (8, 8), (8, 8), (8, 8)):
            x = varying(torch.randn(size))
            agree(run(x), fn(x))
            assert background.wait_until_idle(60)
            made.append(reports[0].executables)
    assert made == [1, 1, 2, 2, 2, 2, 2], "the bounds have one already"
    assert [(s.by, s.calls) for s in reports[0].traffic()] == [("padded", 6), ("exact", 1)]


@pytest.mark.usefixtures("nothing_beside")
def test_a_padded_executable_is_loaded_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DYNAMO_BACKENDS_CACHE", str(tmp_path))
    fn = lambda x: (x.t() @ x).softmax(0).reshape(-1) * 2  # noqa: E731
    hits = []
    for sizes in (((8, 4), (7, 3)), ((6, 4), (5, 2)), ((12, 4),)):
        torch._dynamo.reset()
        with record() as reports:
            run = compiled(fn, cache=True)
            for size in sizes:
                x = varying(torch.randn(size))
                agree(run(x), fn(x))
        hits.append((reports[0].executables, reports[0].cache_hits))
    assert hits == [(1, 0), (1, 1), (1, 0)]


def test_no_size_is_rounded_up_if_nobody_wants_it():
    fn = lambda x: x.relu() + 1  # noqa: E731
    for off in ({"bucket_growth": 1.0}, {"ranges": False}):
        torch._dynamo.reset()
        with record() as reports:
            run = compiled(fn, **off)
            for size in ((3, 5), (4, 6)):
                x = varying(torch.randn(size))
                agree(run(x), fn(x))
        assert reports[0].executables == 2


def test_bounds_stay_below_what_guards_allow():
    assert [round_up(n, 1.5) for n in (0, 4, 5, 9, 13, 21, 100)] == [2, 4, 6, 12, 16, 24, 112]
    assert [round_up(n, 1.1) for n in (3, 7, 9, 33, 90)] == [3, 7, 12, 40, 96]
    assert [round_up(n, 8.0) for n in (2, 3, 17, 129)] == [2, 16, 128, 1024]
    assert round_up(25, 1.5, 27) == 27
    fn = lambda x: x * 2  # noqa: E731
    with record() as reports:
        run = compiled(fn)
        for length in (9, 10):
            x = torch.randn(length, 2)
            torch._dynamo.mark_dynamic(x, 0, min=2, max=10)
            agree(run(x), fn(x))
    assert reports[0].compilations[0].shapes == ("x: float32[s77≤10, 2]",)


def test_views_are_read_back_as_they_were_made():
    import sympy

    from dynamo_backends.graph.symbolic_sizes import SizeWithExpression

    b, n = sympy.symbols("b n", positive=True, integer=True)

    def size(value: int, expression: sympy.Expr) -> SizeWithExpression:
        return SizeWithExpression(value, expression, 0, None)

    start = extents_of((size(4, b), size(8, n), 6))
    flat = reshaped(start, (size(32, b * n), 6))
    assert flat == ((Factor(4, b), Factor(8, n)), (Factor(6),))
    assert flat is not None
    assert reshaped(flat, (size(4, b), size(8, n), 2, 3)) == (
        *start[:2],
        (Factor(2),),
        (Factor(3),),
    )
    assert reshaped(flat, (size(8, n), size(4, b), 6)) is None, "they are another way round"
    assert reshaped(extents_of((size(8, 2 * b),)), (size(4, b), 2)) == (
        (Factor(4, b),),
        (Factor(2),),
    )
    assert reshaped(extents_of((size(32, b * n),)), (size(4, b), size(8, n))) is None


def test_elementwise_operators_need_not_say_anything():
    row = registry.find_padding_rule(aten.exp.default)
    assert row is not None
    assert row.rule is elementwise
    assert registry.find_padding_rule(aten.median.dim) is None


def rows_vary(x: Tensor) -> Tensor:
    torch._dynamo.maybe_mark_dynamic(x, 0)
    return x


def test_what_was_cut_from_memory_of_the_bounds_is_not_copied(
    planted: None, nothing_beside: None, monkeypatch: pytest.MonkeyPatch
):
    """What lies beside it is padding, whatever it is."""
    made: list[Sequence[int]] = []
    plant = executable.allocate_padded_input

    def new_padding(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        made.append(shape)
        return plant(shape, dtype, device)

    monkeypatch.setattr(executable, "allocate_padded_input", new_padding)
    run = compiled(lambda x: (x * 2, x.softmax(0), x.mean(0)), buckets=[8])
    beside = executable.allocate_padded_input((8, 5), torch.float32, torch.device("cpu"))
    made.clear()
    for n in (3, 5, 6):
        x = torch.randn(n, 5)
        agree(run(rows_vary(x)), (x * 2, x.softmax(0), x.mean(0)))
        assert made == [(8, 5)]
        beside[:n] = x
        cut = beside[:n]
        agree(run(rows_vary(cut)), (x * 2, x.softmax(0), x.mean(0)))
        assert made == [(8, 5)], "it is read where it is"
        assert torch.equal(cut, x)
        (again, *_) = run(rows_vary(run(rows_vary(x))[0]))
        agree(again, x * 4)
        assert made == [(8, 5)] * 2, "results are such memory"
        made.clear()
        small = torch.cat([torch.zeros(1, 5), x])[1:]  # its memory ends before that of the bounds
        agree(run(rows_vary(small)), (x * 2, x.softmax(0), x.mean(0)))
        assert made == [(8, 5)]
        made.clear()


def test_memory_that_is_updated_is_not_read_beside(planted: None, nothing_beside: None):
    """What lies beside an input that the graph writes to stays what it is."""

    def fn(x: Tensor) -> Tensor:
        x.add_(1)
        return x.sum(0)

    run = compiled(fn, buckets=[8])
    beside = torch.zeros(8, 5)
    for n in (3, 5, 6):
        beside.zero_()
        x = beside[:n]
        agree(run(rows_vary(x)), torch.full((5,), float(n)))
        assert torch.equal(beside[:n], torch.ones(n, 5))
        assert torch.equal(beside[n:], torch.zeros(8 - n, 5))
