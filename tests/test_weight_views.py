"""Views of weights on every backend for CPUs: folded or shared, they begin where they should.

A weight may be read through a view (a slice, a chunk, a transpose), and be one itself: of other
memory, from an offset on, with gaps or in another order.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.nn.functional import conv2d, layer_norm, linear

import dynamo_backends
from tests import backend_checks as checks
from tests.checking import same

WIDTH = 16

Case = Callable[["Weights", Tensor], Tensor]


class Weights(nn.Module):
    """Weights of all layouts, and some cases of reading them."""

    def __init__(self, cases: dict[str, Case]):
        super().__init__()
        n = WIDTH
        self.whole = nn.Parameter(torch.randn(3 * n, n))
        self.bias = nn.Parameter(torch.randn(3 * n))
        self.tied = self.whole
        self.images = nn.Parameter(torch.randn(8, 2, 3, 3))
        memory = torch.randn(3 * n * n)
        self.late = nn.Parameter(memory[n * n + 3 : 2 * n * n + 3].view(n, n))
        self.columns = nn.Parameter(memory.view(n, 3 * n)[:, n : 2 * n])
        self.turned = nn.Parameter(torch.randn(n, n + 4).t())
        self.gaps = nn.Parameter(torch.randn(2 * n, n)[1::2])
        self.register_buffer("row", torch.randn(4, n)[3:4].expand(n, n))
        self.cases = cases

    def forward(self, x: Tensor) -> list[Tensor]:
        return [case(self, x) for case in self.cases.values()]


FIRST: dict[str, Case] = {
    "last slice": lambda m, x: linear(x, m.whole[WIDTH:], m.bias[WIDTH:]),
    "chunk": lambda m, x: x @ m.whole.chunk(3)[1],
    "transposed slice": lambda m, x: x @ m.whole.t()[:, 5:40],
    "slice with offset": lambda m, x: linear(x, m.late[5:]),
    "gaps": lambda m, x: linear(x, m.gaps),
}
"""Of backends that take long to compile."""

CASES: dict[str, Case] = FIRST | {
    "first slice": lambda m, x: linear(x, m.whole[:WIDTH], m.bias[:WIDTH]),
    "columns": lambda m, x: linear(x[:, 4:], m.whole[:, 4:]),
    "tied slice": lambda m, x: linear(x, m.tied[2 * WIDTH :]),
    "offset": lambda m, x: linear(x, m.late),
    "transposed": lambda m, x: linear(x, m.turned[4:]),
    "whole": lambda m, x: linear(x, m.whole, m.bias),
    "split": lambda m, x: linear(x, m.whole.split([10, 8, 30])[1]),
    "every other": lambda m, x: linear(x, m.whole[1::2], m.bias[1::2]),
    "row": lambda m, x: layer_norm(x, (WIDTH,), m.whole[5], m.whole[20]),
    "item": lambda m, x: x + m.whole.unbind(0)[9] * m.bias[WIDTH],
    "as_strided": lambda m, x: linear(x, m.whole.as_strided((9, WIDTH), (2 * WIDTH, 1), 130)),
    "expanded": lambda m, x: x.unsqueeze(0) @ m.whole[WIDTH : 2 * WIDTH].expand(2, WIDTH, WIDTH),
    "heads": lambda m, x: torch.einsum("bk,hdk->bhd", x, m.whole.view(3, WIDTH, WIDTH)[1:]),
    "diagonal": lambda m, x: x[:, :13] * m.whole.diagonal(3)[:13],
    "columns of memory": lambda m, x: linear(x, m.columns[3:]),
    "expanded buffer": lambda m, x: linear(x, m.row[2:]),
    "filters": lambda m, x: conv2d(x.view(1, 2, 8, 8), m.images[4:]),
    "filters of memory": lambda m, x: conv2d(
        x.view(1, 2, 8, 8), m.whole.view(-1)[300 : 300 + 8 * 2 * 9].view(8, 2, 3, 3)
    ),
}
BACKENDS = {
    **dict.fromkeys(["openxla", "onnxrt", "ov", "ts_trace", "ofi", "static_runtime"], CASES),
    **dict.fromkeys(["onednn_graph", "ltc", "ltc_trace"], CASES),
    **dict.fromkeys(["tvm", "iree", "inductor_freezing"], FIRST),
}


@dataclasses.dataclass
class Subject:
    """A module beside its twin in float64."""

    module: Weights
    twin: Weights

    def change(self) -> None:
        for m in (self.module, self.twin):
            with torch.no_grad():
                m.whole.mul_(0.5)
                m.late.add_(1)
                m.gaps[3].zero_()
                m.turned.data.neg_()


def _subject(cases: dict[str, Case]) -> Subject:
    module = Weights(cases).eval()
    return Subject(module, copy.deepcopy(module).double())


def _gradients(function: Callable[[Tensor], list[Tensor]], owner: Weights, x: Tensor) -> object:
    owner.zero_grad()
    results = function(x)
    sum(r.square().sum() for r in results).backward()
    return results, {
        name: p.grad.clone() for name, p in owner.named_parameters() if p.grad is not None
    }


def _each_change(subject: Subject) -> Iterator[None]:
    yield
    subject.change()
    yield


def _compile(backend: str, subject: Subject) -> Callable[[Tensor], list[Tensor]]:
    # Wrong results shall show, not be replaced by eager's.
    compiler = dynamo_backends.compiler(backend, min_block_size=1, verify="off")
    return torch.compile(subject.module, backend=compiler)


def _ran(reports: list[dynamo_backends.GraphReport]) -> None:
    assert reports
    assert all(r.ops_on_backend > 0 and not r.runtime_fallbacks for r in reports), reports


@pytest.mark.parametrize("backend", BACKENDS)
def test_frozen_weights(backend: str):
    subject, x = _subject(BACKENDS[backend]), torch.randn(8, WIDTH)
    compiled = _compile(backend, subject)
    with torch.no_grad(), dynamo_backends.record() as reports:
        for _ in _each_change(subject):
            same(subject.module(x), compiled(x), subject.twin(x.double()))
    _ran(reports)


@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "static_runtime"])
def test_trained_weights(backend: str, only_with_full: Callable[[bool], None]):
    only_with_full(BACKENDS[backend] is FIRST)
    subject, x = _subject(BACKENDS[backend]), torch.randn(8, WIDTH)
    compiled, (module, twin) = _compile(backend, subject), (subject.module, subject.twin)
    with dynamo_backends.record() as reports:
        for _ in _each_change(subject):
            found = _gradients(compiled, module, x)
            expected = _gradients(module, module, x)
            same(expected, found, _gradients(twin, twin, x.double()))
    _ran(reports)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_products_of_inductor_that_pack_constants():
    n = 64
    memory = torch.randn(4 * n * n)

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.late = nn.Parameter(memory[n * n : 2 * n * n].view(n, n))
            self.attention = nn.MultiheadAttention(n, 4, batch_first=True)

        def forward(self, query: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
            return linear(keys[0], self.late), self.attention(query, keys, keys)[0]

    module, inputs = Module().eval(), (torch.randn(1, 1, n), torch.randn(1, 16, n))
    seen: list[torch.fx.Graph] = []
    settings = {
        "max_autotune_gemm_backends": "CPP",  # no other kernels than those that were wrong
        "post_grad_custom_post_pass": seen.append,  # a user's own, which is still called
    }
    with torch.no_grad(), torch._inductor.config.patch(settings):
        checks.agree("inductor_max_autotune", module, *inputs, verify="off")
    assert seen
