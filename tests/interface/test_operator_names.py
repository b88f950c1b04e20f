"""Names of operators: which calls of a functional graph they mean."""

import pytest
import torch
from torch import fx

from dynamo_backends import OptionError
from dynamo_backends.interface.operator_names import check_operator_names, matches_operator_name
from tests.test_errors import unheard_of

aten = torch.ops.aten


def call(target: object, function: object = None, original: object = None) -> fx.Node:
    """A call as AOT Autograd leaves it, with what the user called and what that was at first."""
    node = fx.Graph().call_function(target, ())  # type: ignore[arg-type]
    if function is not None:
        node.meta["source_fn_stack"] = [("name_1", function)]
    if original is not None:
        node.meta["original_aten"] = original
    return node


@pytest.mark.parametrize(
    ("name", "node", "named"),
    [
        ("aten.add.Tensor", call(aten.add.Tensor), True),
        ("aten.add.Tensor", call(aten.add.Scalar), False),
        ("aten.add", call(aten.add.Scalar), True),
        ("add", call(aten.add.Scalar), True),
        ("add", call(aten.addmm.default), False),
        ("softmax", call(aten._softmax.default), True),
        ("softmax", call(aten._log_softmax.default), False),
        ("aten.softmax.int", call(aten._softmax.default), True),
        ("aten._softmax", call(aten._softmax.default), True),
        ("aten.gelu", call(aten.erf.default, original=aten.gelu.default), True),
        ("aten.linear", call(aten.mm.default, function=torch.nn.functional.linear), True),
        ("aten.linear", call(aten.mm.default, function=torch.mm), False),
        ("aten.mm", call(aten.addmm.default, function=torch.mm), False),
        ("matmul", call(aten.bmm.default, function="matmul"), True),
    ],
)
def test_which_calls_a_name_means(name: str, node: fx.Node, named: bool):
    assert matches_operator_name(node, (name,)) is named
    assert not matches_operator_name(node, ())


def test_operators_of_other_libraries_need_their_namespace():
    node = call(torch.ops.dynamo_backends_tests.unheard_of.default)
    assert unheard_of is not None
    check_operator_names(("dynamo_backends_tests.unheard_of",), "keep_in_eager", "openxla")
    assert matches_operator_name(node, ("dynamo_backends_tests.unheard_of",))
    with pytest.raises(OptionError, match="does not exist, 'unheard_of'"):
        check_operator_names(("unheard_of",), "keep_in_eager", "openxla")
