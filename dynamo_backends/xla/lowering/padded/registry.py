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
class PaddingRuleEntry:
    """Holds a padding rule and the arguments in which it accepts symbolic sizes.

    Attributes:
        rule: The rule.
        shapes: Parameters in which sizes that vary only say what shape the result has, or that the
            rule itself takes for the sizes of each call.
    """

    rule: Rule
    shapes: frozenset[str]


_RULES: dict[str, PaddingRuleEntry] = {}


def register_padding_rule(*names: str, shapes: tuple[str, ...] = ()) -> Callable[[Rule], Rule]:
    """Registers a padding rule for the ATen overloads called `names`.

    Args:
        names: As for `lowers`.
        shapes: See `PaddingRuleEntry`.
    """

    def register(rule: Rule) -> Rule:
        for name in names:
            if name in _RULES:
                raise ValueError(f"{name} already has a rule for padded positions")
            _RULES[name] = PaddingRuleEntry(rule, frozenset(shapes))
        return rule

    return register


_ELEMENTWISE = PaddingRuleEntry(elementwise, frozenset())


def find_padding_rule(target: Any) -> PaddingRuleEntry | None:
    """Returns the padding rule of an ATen overload; None if it has none.

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
