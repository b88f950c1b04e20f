"""Checks which functions a graph from a file calls, and the expressions of its sizes.

torch looks names up in its modules and evaluates expressions as Python. So both are looked at
before, and what no graph of ATen calls has is refused.
"""

import ast
import functools
import math
import operator
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dynamo_backends._torch_private import OpOverload
from dynamo_backends.interface.errors import PackageError

_ARITHMETIC = re.compile(
    "add|and_|eq|floordiv|ge|getitem|gt|le|lt|mod|mul|ne|neg|or_|pos|pow|sub|truediv"
)
_MATH = re.compile("ceil|floor|sqrt|trunc")
_SYMBOLIC = re.compile(r"sym_[a-z_]+")
_SYMBOL = re.compile(r"[a-z]+[0-9]*")
_NUMBER = re.compile(r"-?[0-9.]+(e-?[0-9]+)?")

_FUNCTIONS = re.compile(
    "Add|And|CeilDiv|CeilToInt|CleanDiv|Eq|Equality|FloatTrueDiv|FloorDiv|FloorToInt|GreaterThan"
    "|IntTrueDiv|Integer|LessThan|Max|Min|Mod|ModularIndexing|Mul|Ne|Not|Or|Pow|PowByNatural"
    "|PythonMod|Rational|RoundToInt|StrictGreaterThan|StrictLessThan|ToFloat|TruncToInt"
    "|Unequality|Where"
)
_REFUSED = frozenset(("as_custom_obj", "as_graph", "as_operator"))


def check_program(program: Mapping[str, Any]) -> None:
    """Checks a graph in the form of `program_to_dict`.

    Raises:
        PackageError: It calls what is no operator, or has what no package has.
    """
    graph = program["graph_module"]["graph"]
    for node in graph["nodes"]:
        check_call_operator(node["target"])
        if node["metadata"]:
            raise PackageError("the graph has node metadata, which packages do not support")
    if program["graph_module"]["module_call_graph"] or program["guards_code"]:
        raise PackageError("the graph has guard code or submodules, which packages do not support")
    for key, value in _entries(program):
        if key in _REFUSED:
            raise PackageError(f"the graph has an argument {key!r}, which packages do not support")
        if key == "expr_str":
            check_expression(value)


@functools.cache
def check_call_operator(target: str) -> None:
    """Checks that a call's target in a stored graph names a function that may be called.

    Raises:
        PackageError: It is no operator of torch's, or none that is registered here.
    """
    module, _, name = target.partition(".")
    if module == "_operator" and _ARITHMETIC.fullmatch(name) and hasattr(operator, name):
        return
    if module == "math" and _MATH.fullmatch(name) and hasattr(math, name):
        return
    if module == "torch" and _SYMBOLIC.fullmatch(name) and hasattr(torch, name):
        return
    parts = target.split(".")
    if parts[:2] != ["torch", "ops"] or len(parts) != 5:
        raise PackageError(f"the graph calls {target!r}, which is not an operator of torch")
    found: Any = getattr(getattr(torch.ops, parts[2]), parts[3], None)
    if not isinstance(getattr(found, parts[4], None), OpOverload):
        raise PackageError(
            f"the graph calls {'.'.join(parts[2:])}, which is not registered in this process. "
            "Import the package that registers it before you load the file."
        )


def check_expression(text: str) -> None:
    """Checks the expression of a size, as sympy writes it for Python.

    Raises:
        PackageError: It has anything but symbols, numbers and functions of sizes.
    """
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise PackageError(
            f"a size of the graph is not a valid expression: {text[:80]!r}"
        ) from error
    if not _is_allowed(tree):
        raise PackageError(
            f"a size of the graph is not an expression of symbolic sizes: {text[:80]!r}"
        )


def _is_allowed(node: ast.AST) -> bool:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _is_allowed(node.operand)
    if isinstance(node, ast.Constant):
        return isinstance(node.value, bool | int | float)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    if not all(k.arg is not None and isinstance(k.value, ast.Constant) for k in node.keywords):
        return False
    if node.func.id in ("Symbol", "Float"):
        pattern = _SYMBOL if node.func.id == "Symbol" else _NUMBER
        return len(node.args) == 1 and _is_text(node.args[0], pattern)
    known = _FUNCTIONS.fullmatch(node.func.id) is not None
    return known and all(map(_is_allowed, node.args))


def _is_text(node: ast.AST, pattern: re.Pattern[str]) -> bool:
    value = node.value if isinstance(node, ast.Constant) else None
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, Mapping):
            yield from each.items()
            left.extend(each.values())
        elif isinstance(each, list):
            left.extend(each)
