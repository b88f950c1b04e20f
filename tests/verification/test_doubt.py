"""What is inexact or undetermined raises no alarm; what is wrong does, however little it is."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from dynamo_backends.graph.graph import Graph, Input, Role
from dynamo_backends.verify.first_call import Comparison, ComparisonOutcome
from dynamo_backends.verify.reference import EagerInterpreter

aten = torch.ops.aten


def traced(fn: Callable[..., Any], *inputs: Tensor) -> Graph:
    """A functional graph of a function that returns a tuple."""
    module = make_fx(fn, tracing_mode="fake")(*inputs)
    module.graph.eliminate_dead_code()
    names = [p.name for p in module.graph.find_nodes(op="placeholder")]
    return Graph(module, "inference", tuple(Input(n, Role.ACTIVATION) for n in names))


def compare(fn: Callable[..., Any], results: Sequence[Any], *inputs: Tensor) -> ComparisonOutcome:
    """Compares results with those of a function."""
    return Comparison(traced(fn, *inputs))(lambda: results, inputs)


def close_pair(x: Tensor) -> tuple[Tensor, ...]:
    return ((x * 3).sin().argmax(-1),)


def test_an_index_among_nearly_equal_elements_is_undetermined():
    x = torch.randn(64, 50)
    x[:, 7] = x[:, 3] = 0.5236  # the largest of their rows, all but equal
    noisy = (x.double() * 3).sin()
    noisy[:, 7] += 1e-7
    assert compare(close_pair, [noisy.argmax(-1)], x).wrong == ""


def test_an_index_of_another_element_is_wrong():
    x = torch.randn(64, 50)
    wrong = (x * 3).sin().argmax(-1)
    wrong[5] = (wrong[5] + 1) % 50
    assert compare(close_pair, [wrong], x).wrong == "output 0 differs from eager in 1 elements"


def test_ties_may_be_broken_in_any_way():
    x = torch.randint(0, 3, (8, 20))

    def largest(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(aten.topk.default(x, 4))

    _, indices = aten.topk.default(x.double() + torch.rand(8, 20) / 2, 4)
    assert compare(largest, [x.gather(-1, indices), indices], x).wrong == ""
    apart = x * 20 + torch.arange(20)
    values, indices = aten.topk.default(apart, 4)
    wrong = compare(largest, [values, indices.flip(-1)], apart).wrong
    assert wrong == "output 1 differs from eager in 32 elements"


def test_differences_of_nearly_equal_sums_are_undetermined():
    x = torch.randn(4, 100_000)

    def cancelled(x: Tensor) -> tuple[Tensor, ...]:
        return ((x * 1e4).sum(-1) - (x.flip(-1) * 1e4).sum(-1),)

    expected = cancelled(x)[0]
    other = (x * 1e4).reshape(4, 10, -1).sum(-1).sum(-1) - (x * 1e4).cumsum(-1)[:, -1]
    assert (other - expected).abs().max() > 1e-2
    assert compare(cancelled, [other], x).wrong == ""
    assert compare(cancelled, [expected + 5000], x).wrong


def first_steps(x: Tensor) -> tuple[Tensor, ...]:
    """As Adam's: hardly more than the signs of sums; then some zeros."""
    sums = (x * 3).sin().sum(-1)
    return (torch.cat([sums / (sums.abs() + 1e-5), x[0] * 0]),)


def test_a_sign_that_hangs_on_rounding_may_turn_as_others_do():
    x = torch.randn(600, 1000)
    x[:40, 500:] = -x[:40, :500]  # these sums are nearly zero
    x[:40, 0] = torch.linspace(1e-7, 3e-5, 40)
    x[:40, 500] = 0
    (expected,) = first_steps(x)
    turned = expected.clone()
    turned[35] *= -1
    assert compare(first_steps, [turned], x).wrong == ""
    turned[36:40] *= -1
    assert compare(first_steps, [turned], x).wrong, "noise turns fewer of these"
    wrong = expected.clone()
    wrong[700] += 2.5
    assert compare(first_steps, [wrong], x).wrong, "noise does not reach this one"
    wrong = expected.clone()
    wrong[35] += 5
    assert compare(first_steps, [wrong], x).wrong, "noise moves none as far"


def test_undefined_memory_is_not_compared():
    def fresh(x: Tensor) -> tuple[Tensor, ...]:
        return aten.empty.memory_format([9]), x + 1

    x = torch.randn(3)
    assert compare(fresh, [torch.full((9,), 7.0), x + 1], x).wrong == ""
    assert compare(fresh, [torch.full((9,), 7.0), x + 1.1], x).wrong


def test_what_a_cast_makes_of_numbers_that_its_integers_do_not_hold_is_undefined():
    def logarithms(x: Tensor) -> tuple[Tensor, ...]:
        return (x.log().to(torch.int64),)

    x = torch.tensor([0.0, 1.0, 8.0, 20.0])
    assert compare(logarithms, [torch.tensor([-(2**31), 0, 2, 2])], x).wrong == ""
    wrong = compare(logarithms, [torch.tensor([-(2**31), 0, 2, 3])], x).wrong
    assert wrong == "output 0 differs from eager in 2 elements"


def test_a_result_may_have_the_dtype_that_torch_promises():
    """Statistics of layer_norm: torch promises bfloat16, and its kernel computes float32."""

    def statistics(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return (aten.native_layer_norm.default(x, [16], weight, None, 1e-5)[1],)

    x, weight = torch.randn(8, 16, dtype=torch.bfloat16), torch.randn(16)
    (mean,) = statistics(x, weight)
    assert mean.dtype == torch.float32
    assert compare(statistics, [mean.bfloat16()], x, weight).wrong == ""
    assert "differs" in compare(statistics, [mean.bfloat16() + 1], x, weight).wrong


def test_eagers_own_inexactness_is_admitted():
    x = torch.randn(64, 64, dtype=torch.bfloat16)

    def products(x: Tensor) -> tuple[Tensor, ...]:
        return ((x @ x).tanh() @ x,)

    exact = (x.double() @ x.double()).tanh() @ x.double()
    assert compare(products, [exact.bfloat16()], x).wrong == ""
    assert compare(products, [(exact * 1.2).bfloat16()], x).wrong


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda y: y.nan_to_num(0), "output 0 has NaN where eager has not, or the reverse"),
        (lambda y: torch.where(y.isnan(), y, y * 1.5), "output 0 differs from eager by up to"),
        (lambda y: y.double(), "output 0 is float64[6, 5] instead of float32[6, 5]"),
        (lambda y: y.t().contiguous().t(), "output 0 has strides (1, 6) instead of (5, 1)"),
        (lambda y: y[:5], "output 0 is float32[5, 5] instead of float32[6, 5]"),
        (lambda y: None, "output 0 is a NoneType instead of a Tensor"),
    ],
)
def test_what_is_wrong_is_named(spoil: Callable[[Tensor], Any], text: str):
    x = torch.randn(6, 5)
    x[2, 2] = torch.nan
    wrong = compare(lambda x: (x * 2,), [spoil(x * 2)], x).wrong
    assert wrong.startswith(text)


def test_results_in_the_memory_of_an_input_are_wrong():
    x = torch.zeros(5)
    wrong = compare(lambda x: (x + 0,), [x], x).wrong
    assert wrong == "output 0 shares memory with an input, which eager's does not"


def test_too_few_results_are_wrong():
    x = torch.randn(5)
    assert compare(lambda x: (x + 1, x + 2), [x + 1], x).wrong == "1 outputs instead of 2"


def test_if_eager_fails_the_results_are_kept_and_the_reason_is_told():
    table = torch.randn(4, 2)
    rows = torch.tensor([0, 1])
    graph = traced(lambda t, i: (aten.embedding.default(t, i),), table, rows)
    found = [torch.ones(2, 2)]
    outcome = Comparison(graph)(lambda: found, (table, torch.tensor([0, 9])))
    assert outcome.results is found
    assert outcome.wrong == ""
    assert outcome.unverified.startswith("eager, or the comparison with it, failed (IndexError: ")


def test_an_error_of_compiled_code_is_its_callers():
    def fail() -> Sequence[Any]:
        raise ZeroDivisionError

    x = torch.randn(3)
    with pytest.raises(ZeroDivisionError):
        Comparison(traced(lambda x: (x + 1,), x))(fail, (x,))


@pytest.mark.parametrize("saves", [False, True])
def test_no_intermediate_result_lives_longer_than_it_is_needed(saves: bool):
    """Eager's values that are alive at once, in a chain of which every link may be an output."""
    x = torch.randn(10)

    def chain(x: Tensor) -> tuple[Tensor, ...]:
        links = [x]
        for _ in range(20):
            links.append(links[-1].sin())
        return tuple(links[1:] if saves else links[-1:])

    graph = traced(chain, x)
    alive: list[int] = []
    refs: list[Any] = []

    def call(node: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        import weakref

        value: Tensor = node.target(*args, **kwargs)
        refs.append(weakref.ref(value))
        alive.append(sum(ref() is not None for ref in refs))
        return value

    EagerInterpreter(graph.module)((x,), lambda place, value: None, call=call)
    assert len(alive) == 20
    assert max(alive) == 2
    outcome = Comparison(graph)(lambda: chain(x), (x,))
    assert (outcome.expected is None) == saves, "what is returned for later is not kept twice"


def test_calls_that_reach_other_processes_are_not_made_twice():
    x = torch.randn(3)
    graph = traced(lambda x: (x.sin(),), x)
    (node,) = graph.calls
    reduce = torch.ops._c10d_functional.wait_tensor.default
    node.target = reduce
    outcome = Comparison(graph)(lambda: [x], (x,))
    assert outcome.unverified == f"{reduce} communicates with other processes"


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "EagerInterpreter",
        "why_not_repeatable",
        "estimate_peak_bytes",
        "describe_layout_mismatch",
        "Comparator.add_output",
        "Comparator.find_mismatch",
    ],
)
def test_an_error_of_the_comparison_is_nobodys(
    name: str, saves: bool, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(f"dynamo_backends.verify.first_call.{name}", fail)
    x = torch.randn(5)
    graph = traced(lambda x: (x.sin(), x.cos()) if saves else (x.sin().cos().sum(),), x)
    results = [torch.zeros(5), torch.zeros(5)] if saves else [torch.zeros(())]
    outcome = Comparison(graph)(lambda: results, (x,))
    assert outcome.results is results
    assert outcome.wrong == ""
    assert "(ZeroDivisionError: planted)" in outcome.unverified


def test_attention_that_drops_nothing_is_compared():
    q = torch.randn(1, 2, 8, 4)

    def attend(q: Tensor) -> tuple[Tensor, ...]:
        attention = aten._scaled_dot_product_flash_attention_for_cpu.default
        return (attention(q, q, q, 0.0, False)[0],)

    (right,) = attend(q)
    outcome = compare(attend, [right], q)
    assert (outcome.wrong, outcome.unverified) == ("", "")
    assert compare(attend, [right * 1.1], q).wrong
