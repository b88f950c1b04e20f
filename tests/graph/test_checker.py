"""The checker finds each kind of violation, and names it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx

from dynamo_backends import NormalFormError
from dynamo_backends.aot.autograd import compile_functional
from dynamo_backends.graph import NORMAL_FORM, PASSES, Graph, Input, PassSequence, Property, check
from dynamo_backends.graph.canonicalize import CANONICALIZE
from dynamo_backends.graph.decomposition_tables import decomposition_table
from dynamo_backends.graph.graph import Role
from dynamo_backends.graph.normalize import Alias, NormalizedGraph, normalize
from dynamo_backends.graph.properties import Pass
from dynamo_backends.graph.random_draws import SEPARATE_DRAWS

aten = torch.ops.aten


def normalized(fn: Callable[..., object], *inputs: Tensor) -> NormalizedGraph:
    found: list[NormalizedGraph] = []

    def keep(gm: fx.GraphModule, *_: object) -> Callable[..., object]:
        found.append(normalize(gm, "inference", freeze=True))
        return lambda args: gm(*args)

    with torch.no_grad():
        compile_functional(fx.symbolic_trace(fn), inputs, keep, decomposition_table(()))
    return found[0]


def sample() -> Graph:
    return normalized(lambda x: ((x * 2).sum(0), x.t()), torch.ones(2, 3)).graph


def unread(graph: Graph) -> None:
    with graph.module.graph.inserting_after(graph.calls[0]):
        node = graph.module.graph.call_function(aten.neg.default, (graph.calls[0],))
    node.meta["val"] = graph.calls[0].meta["val"]


def in_place(graph: Graph) -> None:
    graph.calls[0].target = aten.mul_.Tensor


def composite(graph: Graph) -> None:
    graph.calls[0].target = aten.matmul.default


def python_function(graph: Graph) -> None:
    graph.calls[0].target = torch.mul


def wrong_shape(graph: Graph) -> None:
    graph.calls[0].meta["val"] = graph.calls[1].meta["val"]


def no_value(graph: Graph) -> None:
    del graph.calls[0].meta["val"]


def wrong_order(graph: Graph) -> None:
    graph.calls[0].append(graph.placeholders[0])


def constant(graph: Graph) -> None:
    graph.module.register_buffer("extra", torch.ones(2, 3))
    with graph.module.graph.inserting_before(graph.calls[0]):
        node = graph.module.graph.get_attr("extra")
    node.meta["val"] = graph.placeholders[0].meta["val"]
    graph.calls[0].args = (node, 2)


BROKEN: dict[str, tuple[Callable[[Graph], None], str]] = {
    "unread": (unread, "LIVE: neg_default is unused"),
    "in place": (in_place, "FUNCTIONAL: mul: aten.mul_.Tensor writes to an argument"),
    "composite": (composite, "DIALECT: mul: aten.matmul.default is CompositeImplicitAutograd"),
    "Python": (python_function, "DIALECT: mul: .* is not an operator overload"),
    "shape": (
        wrong_shape,
        r"TYPED: mul has meta\[.val.\] float32\[3\] .* but aten.mul.Tensor returns float32\[2, 3",
    ),
    "no value": (no_value, r"TYPED: mul has no meta\['val'\]"),
    "order": (wrong_order, "ORDERED: "),
    "constant": (constant, "ROLES: the constant extra is not a placeholder"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_violation_is_named(case: str):
    graph = sample()
    check(graph)
    breaks, text = BROKEN[case]
    breaks(graph)
    with pytest.raises(NormalFormError, match=text):
        check(graph)


def test_roles_must_match_placeholders():
    graph = sample()
    other = Graph(graph.module, graph.kind, (Input("y", Role.ACTIVATION),))
    with pytest.raises(NormalFormError, match="do not match inputs"):
        check(other)


def test_properties_that_passes_ensure_do_not_hold_before_them():
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.rand_like(torch.ops.aten.add.Scalar(x, 1))
        return y.t(), y.view(-1)

    graph = normalized(fn, torch.ones(2, 3)).graph
    for each in (Property.DRAWS_APART, Property.OUTPUTS_APART, Property.CANONICAL):
        with pytest.raises(NormalFormError, match=each.name):
            check(graph, [each])
    PASSES(graph)
    check(graph, PASSES.ensures)


def test_a_pass_that_breaks_the_form_is_named(monkeypatch: pytest.MonkeyPatch):
    def run(graph: Graph) -> bool:
        unread(graph)
        return True

    bad = Pass("bad", "leaves an unread call", NORMAL_FORM, frozenset(), run)
    with pytest.raises(NormalFormError, match="after the pass 'bad'"):
        PassSequence([bad], NORMAL_FORM)(sample())
    monkeypatch.setenv("DYNAMO_BACKENDS_CHECK", "0")
    assert PassSequence([bad], NORMAL_FORM)(sample())


def test_an_order_without_what_a_pass_requires_is_refused():
    with pytest.raises(ValueError, match="no pass before 'separate draws' ensures STATIC"):
        PassSequence([CANONICALIZE, SEPARATE_DRAWS], NORMAL_FORM)


def test_effects():
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        y.add_(1)
        z = x * 2
        return y.view(-1), z, z.t(), x[0], z + 1

    effects = normalized(fn, torch.ones(2, 3), torch.ones(2, 3)).effects
    x, y = "arg0_1", "arg1_1"
    assert effects.mutated == (y,)
    assert effects.aliases == (
        Alias(0, (y,), ()), Alias(1, (), (2,)), Alias(2, (), (1,)), Alias(3, (x,), ()),
    )  # fmt: skip


def test_equal_constants_become_one_placeholder():
    table = torch.tensor([1.0, 2.0])

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", table)

    module = Module()
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.ones(2)
    total = x
    module.register_buffer("other", table)
    for name in ("table", "other"):
        node = graph.get_attr(name)
        node.meta["val"] = table
        total = graph.call_function(aten.add.Tensor, (total, node))
        total.meta["val"] = torch.ones(2)
    graph.output((total,))
    result = normalize(fx.GraphModule(module, graph), "inference", freeze=True)
    assert len(result.constants) == 1
    assert [(x.role, x.frozen) for x in result.graph.inputs[1:]] == [(Role.CONSTANT, True)]


def test_sizes_that_depend_on_data_are_not_checked():
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(lambda x: x.nonzero() * 2, backend="openxla", fullgraph=True)
        x = torch.tensor([1.0, 0.0, 2.0])
        assert torch.equal(compiled(x), x.nonzero() * 2)
