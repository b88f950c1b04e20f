"""Graphs that would have torch call or evaluate something else than operators and sizes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dynamo_backends
from dynamo_backends import PackageError
from dynamo_backends.package import calls
from dynamo_backends.package.checks import check_call_operator, check_expression


def refusal(check: Callable[[str], None], text: str) -> str:
    """Why a text is refused; empty: it is not."""
    try:
        check(text)
    except PackageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "target",
    ["torch.ops.aten.add.Tensor", "torch.ops.aten.__and__.Tensor", "_operator.getitem",
     "_operator.floordiv", "math.ceil", "torch.sym_max",
     "torch.ops.prims.convert_element_type.default"],
)  # fmt: skip
def test_operators_are_allowed(target: str):
    assert refusal(check_call_operator, target) == ""


@pytest.mark.parametrize(
    "target",
    ["torch.hub.load", "torch.load", "torch.ops.load_library", "torch.serialization.load",
     "_operator.methodcaller", "_operator.attrgetter", "math.__loader__.load_module", "os.system",
     "torch.sym_max.__globals__", "#torch_extension", "eval", "torch._C._pickle_load_obj",
     "torch.ops.aten.add.__class__"],
)  # fmt: skip
def test_everything_else_is_refused(target: str):
    with pytest.raises(PackageError, match=r"is not an operator of torch$|not registered"):
        check_call_operator(target)


def test_an_operator_that_is_not_registered_says_what_to_do():
    with pytest.raises(PackageError, match=r"[iI]mport the package that registers it"):
        check_call_operator("torch.ops.someones_library.fused.default")


@pytest.mark.parametrize(
    "text",
    ["Symbol('s77', positive=True, integer=True)", "Mul(Integer(2), Symbol('s0', integer=True))",
     "FloorDiv(Symbol('u3', integer=True), Integer(-2))", "Integer(7)",
     "Float('0.5', precision=53)"],
)  # fmt: skip
def test_expressions_of_sizes_are_allowed(text: str):
    assert refusal(check_expression, text) == ""


@pytest.mark.parametrize(
    "text",
    ["__import__('os').system('true')", "Symbol('s0').__class__", "Integer(2, **{})", "Mul(*[])",
     "(lambda: 1)()", "Symbol(open('x'))", "Symbol('s0; import os')", "Lambda(1)", "s0", "1 +",
     "Float('__import__(1)')", "[].append(1)", "Mul(" * 2000],
)  # fmt: skip
def test_other_expressions_are_refused(text: str):
    with pytest.raises(PackageError, match=r"is not an? .*expression"):
        check_expression(text)


def _targets(_: Any, graph: Any) -> None:
    graph["graph_module"]["graph"]["nodes"][0]["target"] = "torch.hub.load"


def _guards(_: Any, graph: Any) -> None:
    graph["guards_code"] = ["__import__('os').abort()"]


def _modules(_: Any, graph: Any) -> None:
    graph["graph_module"]["module_call_graph"] = [{"fqn": "", "signature": None}]


def _metadata(_: Any, graph: Any) -> None:
    graph["graph_module"]["graph"]["nodes"][0]["metadata"] = {"source_fn_stack": "x,torch.load"}


def _objects(_: Any, graph: Any) -> None:
    argument = {"as_custom_obj": {"name": "x", "class_fqn": "y"}}
    graph["graph_module"]["graph"]["nodes"][0]["inputs"][0]["arg"] = argument


def _sizes(_: Any, graph: Any) -> None:
    size = {"as_expr": {"expr_str": "__import__('os').abort()", "hint": None}}
    values = graph["graph_module"]["graph"]["tensor_values"]
    values[next(iter(values))]["sizes"] = [size]


@pytest.mark.parametrize("change", [_targets, _guards, _modules, _metadata, _objects, _sizes])
def test_a_graph_with_any_of_it_is_not_read(
    packages: Any, rewritten: Callable[..., Path], change: Callable[..., None]
):
    with pytest.raises(PackageError, match=r"the graph|a size"):
        assert dynamo_backends.load(rewritten(packages("onnxrt"), change)).portable


def _no_name(manifest: Any, _: Any) -> None:
    del manifest["name"]


def _no_list(manifest: Any, _: Any) -> None:
    manifest["executables"] = {"a": 1}


def _other_weight(manifest: Any, _: Any) -> None:
    manifest["weights"]["names"]["first.bias"] = "nobody"


def _elsewhere(manifest: Any, _: Any) -> None:
    manifest["weights"]["checkpoint"] = {"name": "../secret", "sha256": "", "tensors": []}


@pytest.mark.parametrize("change", [_no_name, _no_list, _other_weight, _elsewhere])
def test_a_manifest_that_does_not_fit_is_an_error(
    packages: Any, rewritten: Callable[..., Path], change: Callable[..., None]
):
    with pytest.raises(PackageError, match=r"invalid manifest|missing|another directory"):
        dynamo_backends.load(rewritten(packages("onnxrt"), change))


CALLS = str(calls.call_to_text(torch.ops.aten.full.default, ([2], 1.0), {"dtype": torch.float32}))


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ('{"torch": "float32"}', '{"torch": "load"}'),
        ('{"torch": "float32"}', '{"code": "1"}'),
        ('{"torch": "float32"}', '{"node": "x"}'),
        ('{"operator": "aten.full.default"}', '{"operator": "os.system.default"}'),
        ('{"operator": "aten.full.default"}', '{"function": "eval"}'),
    ],
)
def test_a_small_graph_with_anything_else_is_refused(given: str, instead: str):
    assert given in CALLS
    assert torch.equal(calls.deserialize_callable(CALLS)(())[0], torch.ones(2))
    with pytest.raises(PackageError, match="a graph of the package is invalid"):
        calls.module_of(CALLS.replace(given, instead))


def test_a_small_graph_of_an_unknown_operator_says_what_to_do():
    text = CALLS.replace("aten.full.default", "someones.fused.default")
    with pytest.raises(PackageError, match=r"[iI]mport the package that registers it"):
        calls.module_of(text)
