"""Which assumptions about sizes do not follow from the ranges and equalities of symbols."""

import ast
import inspect
from collections.abc import Sequence
from typing import Any

import sympy
from torch import Tensor, nn
from torch.utils import _pytree as pytree


def unproven(model: nn.Module, exported: Any, guards: Sequence[str]) -> list[str]:
    """The guards of an exported program that symbols do not imply, in words.

    Args:
        model: What was exported.
        exported: torch's exported program of it.
        guards: As Python code over its arguments, `L`; torch made it in this process.
    """
    if not guards:
        return []
    places = {n.name: n.meta.get("val") for n in exported.graph.find_nodes(op="placeholder")}
    specs = exported.graph_signature.input_specs
    given = [_Sized(places.get(s.arg.name)) for s in specs if s.kind.name == "USER_INPUT"]
    args, kwargs = pytree.tree_unflatten(given, exported.call_spec.in_spec)
    arguments = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    return [guard for guard in guards if not _follows(guard, arguments)]


class _Sized:
    """Stands for an argument in the code of guards; its sizes are expressions."""

    def __init__(self, value: Any):
        self._sizes = list(map(_expression, value.shape)) if isinstance(value, Tensor) else []

    def size(self) -> list[Any]:
        """The sizes."""
        return self._sizes


def _expression(size: Any) -> Any:
    node = getattr(size, "node", None)
    return sympy.Integer(size) if node is None else node.expr


def _follows(guard: str, arguments: Any) -> bool:
    try:
        code = ast.parse(guard, mode="eval").body
        if "!=" in guard:  # of expressions that are spelled differently `!=` is always true
            return _differ(code, arguments)
        found = _value(code, arguments)
    except Exception:  # whatever code of torch's does with expressions
        return False
    return bool(found is True or found is sympy.true)


def _differ(code: ast.expr, arguments: Any) -> bool:
    """Whether the two sides of `!=` differ for all values of the symbols."""
    if not isinstance(code, ast.Compare) or not isinstance(code.ops[0], ast.NotEq):
        return False
    left, right = (_value(side, arguments) for side in (code.left, *code.comparators))
    return sympy.simplify(left - right).is_nonzero is True


def _value(code: ast.expr, arguments: Any) -> Any:
    """The value of an expression of arguments' sizes, which may be symbols."""
    compiled = compile(ast.Expression(code), "<guard>", "eval")
    return eval(compiled, {"__builtins__": {}}, {"L": arguments})
