"""The table that says how operators treat padded positions.

A rule is a function of a `PaddedCall`. It runs the operator's lowering as it is, on arguments in
which it has masked what must not count, and says which positions of the results are valid::

    @pads("sum.dim_IntList")
    def sum_(call):
        x, over = call["self"], call.axes("self", "dim")
        return call.run(self=x.masked(over, 0)), x.without(over, call.value("keepdim"))
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dynamo_backends.xla.lowering.padded.call import PaddedCall, Placed, elementwise
from dynamo_backends.xla.lowering.registry import Layout, lookup

Rule = Callable[[PaddedCall], Placed]


@dataclass(frozen=True)
class Declared:
    """A row of the table.

    Attributes:
        rule: The rule.
        shapes: Parameters in which sizes that vary only say what shape the result has, or that the
            rule itself takes for the sizes of each call.
    """

    rule: Rule
    shapes: frozenset[str]


_RULES: dict[str, Declared] = {}


def pads(*names: str, shapes: tuple[str, ...] = ()) -> Callable[[Rule], Rule]:
    """Registers how the ATen overloads called `names` treat padded positions.

    Args:
        names: As for `lowers`.
        shapes: See `Declared`.
    """

    def register(rule: Rule) -> Rule:
        for name in names:
            if name in _RULES:
                raise ValueError(f"{name} already has a rule for padded positions")
            _RULES[name] = Declared(rule, frozenset(shapes))
        return rule

    return register


_ELEMENTWISE = Declared(elementwise, frozenset())


def declared(target: Any) -> Declared | None:
    """Returns how an operator treats padded positions; None: it does not say.

    Args:
        target: An overload. Elementwise operators need not say anything.
    """
    name = str(target)
    found = _RULES.get(name.removeprefix("aten.") if name.startswith("aten.") else _named(name))
    if found is None:
        row = lookup(target)
        if row is not None and row.layout is Layout.POINTWISE:
            return _ELEMENTWISE
    return found


def _named(name: str) -> str:
    namespace, _, rest = name.partition(".")
    return f"{namespace}::{rest}"
