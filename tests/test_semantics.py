"""Whatever torch promises beyond values: mutation, aliases, strides, dtypes, random numbers.

Another backend: `DYNAMO_BACKENDS_TEST_BACKEND=ltc python -m pytest tests/test_semantics.py`.
"""

import copy
import os
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import dynamo_backends
from tests.checking import check, copy_inputs, same, tensors


@dataclass(frozen=True)
class Subject:
    """The backend under test."""

    name: str

    @property
    def has_every_operator(self) -> bool:
        return self.name == "openxla"

    @property
    def compiler(self) -> Any:
        return dynamo_backends.compiler(self.name, min_block_size=1)

    def check(self, *args: Any, ops_in_eager: int | None = 0, **settings: Any) -> None:
        """See `tests.checking.check`; the operators that a backend does not have run in eager."""
        allowed = ops_in_eager if self.has_every_operator else None
        check(*args, backend=self.name, ops_in_eager=allowed, min_block_size=1, **settings)


_NAMED = os.environ.get("DYNAMO_BACKENDS_TEST_BACKEND")


@pytest.fixture(params=[_NAMED] if _NAMED else ["openxla", "onnxrt", "ov"])
def subject(request: pytest.FixtureRequest) -> Subject:
    return Subject(request.param)


def test_in_place_operators_change_the_callers_tensors(subject: Subject):
    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1).mul_(y)
        y[0] = 5
        return x + y

    with torch.no_grad():
        subject.check(fn, torch.randn(3, 4), torch.randn(3, 4))


def test_results_without_elements_can_be_resized(subject: Subject):
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.empty(0)
        torch.add(x, 1, out=y)  # the graph ends before it
        return y, y * 2

    subject.check(fn, torch.randn(4, 6), fullgraph=False, ops_in_eager=None)
    compiled = torch.compile(lambda x: (x[:, :0] + 1).t(), backend=subject.compiler)
    result = compiled(torch.randn(4, 6))
    assert result.shape == (0, 4)
    assert torch.equal(torch.mul(torch.ones(3), 2, out=result), torch.full((3,), 2.0))


def test_in_place_on_a_view_of_an_input(subject: Subject):
    def fn(x: Tensor) -> Tensor:
        x[:, 1:3].sigmoid_()
        return x * 2

    subject.check(fn, torch.randn(4, 6))


def test_two_inputs_that_share_memory(subject: Subject):
    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        return y * 3

    base = torch.arange(12.0)
    compiled = torch.compile(fn, backend=subject.compiler)
    a, b = base.clone(), base.clone()
    assert torch.equal(compiled(a[:8], a[4:]), fn(b[:8], b[4:]))
    assert torch.equal(a, b)


def test_batch_norm_in_training_mode_updates_its_buffers(subject: Subject):
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).train()
    twin = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).train()
    twin.load_state_dict(module.state_dict())
    compiled = torch.compile(module, backend=subject.compiler)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(4, 3, 8, 8)
            torch.testing.assert_close(compiled(x), twin(x))
    for (name, ours), theirs in zip(module.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)


def test_outputs_that_are_views_of_inputs_and_of_each_other(subject: Subject):
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = x * 2
        return x.t(), x[1:], y, y.view(-1), y.t(), x

    subject.check(fn, torch.randn(4, 6), ops_in_eager=0)


def test_an_input_returned_as_it_is(subject: Subject):
    x = torch.randn(3)
    compiled = torch.compile(lambda x: (x, x + 1), backend=subject.compiler)
    assert compiled(x)[0] is x


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(3, 1).expand(3, 5),
        torch.randn(8, 10)[::2, 1::3],
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 6).t(),
        torch.randn(2, 3, 4).permute(2, 0, 1),
        torch.randn(0, 4),
        torch.tensor(3.0),
        torch.randn(9)[1:],
        torch.randn(5, dtype=torch.complex64).conj(),
        torch.randn(5, dtype=torch.complex64).conj().imag,
    ],
    ids=["expanded", "strided", "channels_last", "transposed", "permuted", "empty", "0-d",
         "misaligned", "conj", "neg"],
)  # fmt: skip
def test_unusual_inputs(subject: Subject, x: Tensor):
    subject.check(lambda x: (x * 2 + 1, x.sum(), x.exp()), x)


def test_inputs_whose_layout_changes_between_calls(subject: Subject):
    compiled = torch.compile(lambda x: x * 2 + x.sum(0), backend=subject.compiler)
    x = torch.randn(6, 6)
    for y in (x, x.t(), x.expand(6, 6), torch.randn(12, 12)[::2, ::2], x.t().contiguous()):
        torch.testing.assert_close(compiled(y), y * 2 + y.sum(0))


def test_channels_last_models_keep_their_layout(subject: Subject):
    module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2)).eval()
    module = module.to(memory_format=torch.channels_last)
    with torch.no_grad():
        subject.check(module, torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last))


def test_expanded_and_strided_outputs(subject: Subject):
    subject.check(
        lambda x: ((x + 1).expand(4, 3), (x + 1).view(1, 3, 1).expand(2, 3, 5)), torch.randn(3)
    )
    subject.check(lambda x: (x + 1)[::2], torch.randn(6, 3))


class Pair(NamedTuple):
    first: Tensor
    rest: dict[str, Any]


def test_none_and_nested_outputs(subject: Subject):
    def fn(x: Tensor) -> Pair:
        return Pair(x + 1, {"none": None, "list": [x * 2, (x - 1, 7)], "text": "a"})

    subject.check(fn, torch.randn(3))


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
     torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128],
)  # fmt: skip
def test_dtypes_are_kept(subject: Subject, dtype: torch.dtype):
    x = torch.tensor([0, 1, 3, 100]).to(dtype)
    subject.check(lambda x: (x, x == 1, x.reshape(2, 2).flip(0), torch.cat([x, x])), x)


def test_64_bit_integers_and_floats_are_not_truncated(subject: Subject):
    big = torch.tensor([2**40 + 1, -(2**50) - 3])
    subject.check(lambda x: (x + 1, x * 2, x // 3), big)
    tiny = torch.tensor([1 + 2.0**-40, 1.0], dtype=torch.float64)
    compiled = torch.compile(lambda x: x - 1, backend=subject.compiler)
    assert compiled(tiny)[0].item() == 2.0**-40


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_models_in_other_precisions(subject: Subject, dtype: torch.dtype):
    module = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    with torch.no_grad():
        subject.check(module.to(dtype).eval(), torch.randn(5, 16, dtype=dtype))


class Sub(torch.Tensor):
    """A subclass without behaviour of its own."""


def test_tensor_subclasses_give_eagers_result(subject: Subject):
    x = torch.randn(3).as_subclass(Sub)
    result = torch.compile(lambda x: x * 2 + 1, backend=subject.compiler)(x)
    assert torch.equal(result.as_subclass(Tensor), x.as_subclass(Tensor) * 2 + 1)


def test_random_numbers_equal_eagers_and_differ_between_calls(subject: Subject):
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        a = torch.nn.functional.dropout(x * 2, 0.5, training=True)
        b = torch.rand(3, 4) + torch.rand_like(x)
        return a, b, torch.nn.functional.dropout(a + 1, 0.3, training=True)

    x = torch.randn(3, 4)
    compiled = torch.compile(fn, backend=subject.compiler)
    with dynamo_backends.record() as reports:
        torch.manual_seed(3)
        first, second = compiled(x), compiled(x)
    torch.manual_seed(3)
    expected = fn(x), fn(x)
    for ours, theirs in zip((first, second), expected, strict=True):
        for o, t in zip(ours, theirs, strict=True):
            torch.testing.assert_close(o, t, rtol=1e-6, atol=0)
    assert not torch.equal(first[0], second[0])
    if subject.has_every_operator:
        assert reports[0].blocks == 1, "drawing must not split the block"


def test_autocast_to_bfloat16(subject: Subject):
    module = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)).eval()

    def fn(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module(x)

    x = torch.randn(3, 16)
    with torch.no_grad():
        result = torch.compile(fn, backend=subject.compiler)(x)
        expected, precise = fn(x), module.double()(x.double())
    same(expected, result, precise)
    assert result.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", [torch.float32, torch.bool])
def test_queries_that_a_mask_hides_every_key_from(subject: Subject, kind: torch.dtype):
    visible = torch.rand(2, 1, 5, 5) > 0.3
    visible[0, 0, :2] = False  # as a batch that is padded to the left has them
    mask = visible if kind == torch.bool else torch.zeros(2, 1, 5, 5).masked_fill(~visible, -inf)

    def fn(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    q, k, v = (torch.randn(2, 2, 5, 8) for _ in range(3))
    with torch.no_grad():
        assert torch.equal(fn(q, k, v, mask)[0, :, :2], torch.zeros(2, 2, 8))
        subject.check(fn, q, k, v, mask)


def test_inference_mode(subject: Subject):
    module = nn.Linear(4, 4).eval()
    x = torch.randn(2, 4)
    with torch.inference_mode():
        result = torch.compile(module, backend=subject.compiler)(x)
        assert result.is_inference()
        torch.testing.assert_close(result, module(x))


def test_gradients_are_right(subject: Subject):
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(8 * 16, 10), nn.LayerNorm(10), nn.GELU(),
    )  # fmt: skip
    x = torch.randn(4, 3, 8, 8, requires_grad=True)
    target = torch.randint(0, 10, (4,))

    def gradients(model: Any, x: Tensor) -> list[Tensor]:
        module.zero_grad()
        x.grad = None
        nn.functional.cross_entropy(model(x), target).backward()
        return [x.grad, *(p.grad.clone() for p in module.parameters())]

    state = {k: v.clone() for k, v in module.state_dict().items()}
    with dynamo_backends.record() as reports:
        ours = gradients(torch.compile(module, backend=subject.compiler), x)
    module.load_state_dict(state)
    theirs = gradients(module, x)
    module.load_state_dict(state)
    module.double()
    precise = gradients(module, x.detach().double().requires_grad_())
    same(theirs, ours, precise)
    assert {r.kind for r in reports} == {"forward", "backward"}
    if subject.has_every_operator:
        assert sum(r.ops_in_eager for r in reports) == 0


@pytest.mark.parametrize("kind", ["plain", "causal", "masked", "scaled", "shared heads"])
def test_gradients_of_attention(subject: Subject, kind: str):
    query, key, value = (torch.randn(2, n, 5, 8) for n in (4, 2, 2))
    check_gradients_of_attention(subject, kind, query, key, value)


def test_batch_norm_in_training_too_large_for_trials(subject: Subject):
    """Vendors' conversions compute with the averages that are kept, as after training."""
    module = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
    subject.check(module, torch.randn(4, 3, 96, 96))


def test_gradients_of_attention_too_large_for_trials(subject: Subject):
    """Of sizes for which the exporter's lowering has a sum of exponentials that would fit."""
    inputs = (torch.randn(2, 32, 32, 136) for _ in range(3))
    check_gradients_of_attention(subject, "plain", *inputs)


def check_gradients_of_attention(
    subject: Subject, kind: str, query: Tensor, key: Tensor, value: Tensor
) -> None:
    settings: dict[str, Any] = {
        "causal": {"is_causal": True},
        "masked": {"attn_mask": torch.zeros(5, 5).masked_fill(torch.rand(5, 5) > 0.6, -inf)},
        "scaled": {"scale": 0.3},
        "shared heads": {"enable_gqa": True},
    }.get(kind, {})
    inputs = (query, key, value) if kind == "shared heads" else (query, query * 2, query + 1)

    def gradients(function: Any, *inputs: Tensor) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        result = function(*leaves)
        result.square().sum().backward()
        return [result.detach(), *(x.grad for x in leaves)]

    def fn(*inputs: Tensor) -> Tensor:
        mask = settings.get("attn_mask")
        given = settings if mask is None else {"attn_mask": mask.to(inputs[0].dtype)}
        return nn.functional.scaled_dot_product_attention(*inputs, **given)

    ours = gradients(torch.compile(fn, backend=subject.compiler), *inputs)
    same(gradients(fn, *inputs), ours, gradients(fn, *(x.double() for x in inputs)))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_gradients_of_bags_too_large_for_trials(subject: Subject, mode: str):
    module = nn.EmbeddingBag(9000, 120, mode=mode)
    compiled = torch.compile(module, backend=subject.compiler)
    bags = torch.randint(9000, (3, 4))

    def gradient(function: Any, module: nn.Module) -> list[Tensor]:
        module.weight.grad = None
        result = function(bags)
        result.square().sum().backward()
        return [result.detach(), module.weight.grad]

    ours, theirs = gradient(compiled, module), gradient(module, module)
    precise = copy.deepcopy(module).double()
    same(theirs, ours, gradient(precise, precise))


@pytest.mark.parametrize("grad", [False, True])
def test_dynamic_batch(subject: Subject, grad: bool):
    module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    compiled = torch.compile(module, backend=subject.compiler, dynamic=True)
    with dynamo_backends.record() as reports, torch.set_grad_enabled(grad):
        for batch in (*range(1, 17), 5, 3):
            x = torch.randn(batch, 8)
            torch.testing.assert_close(compiled(x), module(x))
    graphs = [r for r in reports if r.kind != "backward"]
    assert len(graphs) <= 2, "batch 1 is special to Dynamo; everything else is one graph"
    backend = dynamo_backends.get_backend(subject.name)
    made = sum(r.executables for r in graphs)
    if backend.buckets(backend.Options()) is not None:
        assert 2 <= made <= 16, "one for bounds may serve several sizes; narrower ones come beside"
        return
    sizes = 2 if backend.serves_ranges else 16
    assert made == (sizes if backend.trains or not grad else 0)


def test_shapes_as_outputs_and_in_arithmetic(subject: Subject):
    def fn(x: Tensor) -> tuple[Any, ...]:
        n = x.shape[0]
        return x.view(n // 2, 2, -1) * n, n, torch.arange(n), x.new_zeros(n, n + 1)

    compiled = torch.compile(fn, backend=subject.compiler, dynamic=True)
    for n in (4, 6, 10):
        x = torch.randn(n, 3)
        ours, theirs = compiled(x), fn(x)
        assert ours[1] == theirs[1]
        for o, t in zip(tensors(ours), tensors(theirs), strict=True):
            torch.testing.assert_close(o, t)


def test_python_control_flow_and_graph_breaks(subject: Subject):
    def fn(x: Tensor) -> Tensor:
        x = x * 2
        if x.sum() > 0:
            return x.exp()
        print("negative")
        return x.abs() + len(x)

    compiled = torch.compile(fn, backend=subject.compiler)
    for x in (torch.ones(3), -torch.ones(3), torch.zeros(3)):
        torch.testing.assert_close(compiled(x), fn(x))


def test_eager_operators_in_the_middle(subject: Subject):
    def fn(x: Tensor) -> Tensor:
        values, inverse = torch.unique(x.round(), return_inverse=True)
        return torch.sin(inverse.float()) * 2 + values.sum()

    subject.check(fn, torch.randn(10), ops_in_eager=None, fullgraph=False)


def test_copies_do_not_share_memory():
    x = torch.randn(3)
    a, b = copy_inputs((x, x))
    assert a.data_ptr() != b.data_ptr() != x.data_ptr()
