"""Where a reference in float64 decides, and where a look at eager's result is enough."""

import operator
from typing import Any

import pytest
import torch
from torch import Tensor

from dynamo_backends.verify.trials import judge
from dynamo_backends.verify.trials.judge import EagerRefusedError, Judge
from tests.trials.test_trials import call_of

aten = torch.ops.aten


@pytest.fixture
def references(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The references that were computed."""
    made: list[Any] = []
    original = judge.module_in_float64

    def counted(module: Any) -> Any:
        made.append(module)
        return original(module)

    monkeypatch.setattr(judge, "module_in_float64", counted)
    return made


def test_what_is_near_needs_no_reference(references: list[Any]) -> None:
    a, b = torch.randn(30, 400), torch.randn(400, 20) * 50
    near = lambda args: [(args[0].double() @ args[1].double()).float()]  # noqa: E731
    assert Judge(call_of(aten.mm.default, a, b))(near, [a, b]) is None
    x = torch.tensor([1.0, float("nan"), float("inf"), -3.0])
    assert Judge(call_of(aten.relu.default, x))(lambda args: [args[0].relu()], [x]) is None
    n = torch.tensor([1, 2**40])
    assert Judge(call_of(aten.neg.default, n))(lambda args: [-args[0]], [n]) is None
    assert not references


def test_what_is_not_near_is_measured_by_the_reference(references: list[Any]) -> None:
    """Eager sums in float32 what cancels; one that is more precise is right, however far off."""
    x = torch.cat([torch.tensor([1e8, 1.0, -1e8]), torch.zeros(40)])
    graph = call_of(aten.sum.default, x)
    precise = x.double().sum().float()
    assert abs(graph.module(x)[0] - precise) > 0.1
    assert Judge(graph)(lambda args: [args[0].sum()], [x]) is None
    assert not references
    wrong = Judge(graph)(lambda args: [args[0].sum() + 5000], [x])
    assert wrong is not None
    assert len(references) == 1


@pytest.mark.parametrize("distance", [1, 100, 8191])
def test_sums_in_which_large_numbers_cancel_may_lose_the_others(distance: int) -> None:
    """Whether they do is a matter of the order."""
    x = torch.randn(8193, 2).abs()
    x[0, 0], x[distance, 0] = 1e20, -1e20
    graph = call_of(aten.sum.default, x)
    in_order = lambda args: [args[0].flatten().cumsum(0)[-1]]  # noqa: E731
    shuffled = torch.cat([x[1:], x[:1]]).flatten()
    assert Judge(graph)(in_order, [x]) is None
    assert Judge(graph)(lambda args: [shuffled.sum()], [x]) is None
    assert Judge(graph)(lambda args: [args[0].abs().sum()], [x]) is not None


@pytest.mark.parametrize("off", [2e-4, 1e-3, 0.1])
def test_what_is_wrong_is_wrong(off: float) -> None:
    def spoiled(args: list[Tensor]) -> list[Tensor]:
        return [args[0] @ args[1] + off * (args[0] @ args[1]).abs().max()]

    a, b = torch.randn(30, 40), torch.randn(40, 20)
    assert Judge(call_of(aten.mm.default, a, b))(spoiled, [a, b]) is not None


def test_indices_out_of_bounds_do_not_reach_a_device() -> None:
    """A CPU says so; what runs on a GPU after such a kernel fails, whatever it is."""
    x, places = torch.randn(1, 2), torch.tensor([0, 0])
    for target in (aten.embedding.default, aten.take.default):
        judge = Judge(call_of(target, x, places))
        judge._hold_indices([x, places])
        with pytest.raises(EagerRefusedError):
            judge._hold_indices([x, places + 2])
    whole = torch.ones(3, 2, dtype=torch.int8)
    Judge(call_of(aten.add.Tensor, whole, whole))._hold_indices([whole, whole])


@pytest.mark.parametrize(
    ("target", "given"),
    [
        (aten.index_select.default, (torch.randn(3, 2), 0, torch.tensor([1, 3]))),
        (aten.gather.default, (torch.randn(3, 2), 0, torch.tensor([[1, 3]]))),
        (aten.index.Tensor, (torch.randn(3, 2), [torch.tensor([1, 3])])),
        (aten.nll_loss_forward.default,
         (torch.randn(2, 3), torch.tensor([1, 3]), None, 1, -100)),
    ],
)  # fmt: skip
def test_torchs_errors_of_indices_are_known(target: Any, given: tuple[Any, ...]) -> None:
    with pytest.raises((IndexError, RuntimeError)) as raised:
        target(*given)
    assert judge._OUT_OF_BOUNDS.search(str(raised.value))


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("target", "given", "wrong"),
    [
        (aten.sigmoid.default, -20.0, 0.0),
        (aten.sigmoid.default, -20.0, -2.0612e-9),
        (aten.softplus.default, -20.0, -1.9e-6),
        (aten.log_sigmoid_forward.default, -100.0, -INF),
        (aten.log.default, 0.0, -1e30),
        (aten.exp.default, 100.0, 3e38),
        (aten.exp.default, NAN, INF),
        (aten.erf.default, 1e-9, 0.0),
        (aten.tan.default, 1e-3, 0.0),
    ],
)
@pytest.mark.parametrize("others", [0, 100])
def test_no_zero_infinity_or_sign_is_hidden(
    target: Any, given: float, wrong: float, others: int
) -> None:
    """Whatever the other elements are."""
    x = torch.cat([torch.tensor([given]), torch.linspace(0.1, 1e4, others)])
    expected = target(x)
    right = expected[0] if isinstance(expected, tuple) else expected
    graph = call_of_first(target, x)
    assert Judge(graph)(lambda args: [right.clone()], [x]) is None

    def spoiled(args: list[Tensor]) -> list[Tensor]:
        result = right.clone()
        result[0] = wrong
        return [result]

    assert Judge(graph)(spoiled, [x]) is not None


def call_of_first(target: Any, x: Tensor) -> Any:
    """A call whose first result is read."""
    graph = call_of(target, x)
    node = graph.calls[0]
    if isinstance(node.meta["val"], tuple):
        output = graph.module.graph.output_node()
        with graph.module.graph.inserting_before(output):
            first = graph.module.graph.call_function(operator.getitem, (node, 0))
        first.meta["val"] = node.meta["val"][0]
        output.args = ((first,),)
        graph.module.recompile()
    return graph


@pytest.mark.parametrize("target", [aten.sum.dim_IntList, aten.amax.default])
def test_each_row_of_a_reduction_counts(target: Any) -> None:
    """One row of large numbers hides no other one."""
    x = torch.tensor([[1e20, 2e20], [0.5, 0.25], [-3.0, 0.5]])
    graph = call_of_rows(target, x)
    assert Judge(graph)(lambda args: [target(args[0], [1])], [x]) is None
    for wrong in (0.0, -0.75, INF):
        spoiled = target(x, [1])
        spoiled[1] = wrong
        assert Judge(graph)(lambda args, r=spoiled: [r.clone()], [x]) is not None


def call_of_rows(target: Any, x: Tensor) -> Any:
    graph = call_of(target, x) if target is aten.amax.default else call_of(aten.sum.default, x)
    node = graph.calls[0]
    node.target, node.args = target, (node.args[0], [1])
    node.meta["val"] = target(x, [1])
    graph.module.recompile()
    return graph
