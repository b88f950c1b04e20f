"""Compares the arguments of a call with a template, by a generated function without loops.

Calls whose templates differ in tensors alone share the function: a step has many more calls than
kinds of calls, and code that is run once in each step would not stay in the processor's caches.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from dynamo_backends._torch_private.pending_tensors import is_any_autocast_enabled
from dynamo_backends._torch_private.step_hooks import top_saved_tensors_hooks
from dynamo_backends.aot.step.record.templates import Items, Number, Ref, same_constant
from dynamo_backends.aot.step.record.trie import Trie, TrieNode, torch_state

Compare = Callable[[tuple[Any, ...], Any, list[Any], tuple[Any, ...], Any], bool]
"""From arguments, keyword arguments, the values of the trie, constants and the segment."""

Comparison = tuple[Any, Any, Any, int, tuple[Any, ...]]
"""Function that is called, `Compare`, place that the call leads to, the number of its result (-1:
not a single tensor), and constants: settings of torch, then what the generated code reads."""

_FIRST = 1
NO_COMPARISON: Comparison = (None, None, None, -1, ())
"""Of a place behind which not exactly one plain call follows."""


def comparison_of(trie: Trie, node: TrieNode) -> Comparison:
    """Returns the comparison with the call that leads to a place."""
    if node.comparison is None:
        entry, parent = node.entry, node.parent
        assert entry is not None
        assert parent is not None
        source = _Source(trie, parent.known)
        source.add_call(entry.args, entry.kwargs)
        grad, hooks, autocast = entry.state
        is_plain = hooks is None and not autocast
        single = getattr(entry.result, "value", -1) if type(entry.result) is Ref else -1
        node.comparison = (
            entry.function, _compiled(source.text(is_plain)), node, single,
            (grad if is_plain else entry.state, *source.constants),
        )  # fmt: skip
    return node.comparison


@functools.lru_cache(maxsize=4096)
def _compiled(text: str) -> Compare:
    names: dict[str, Any] = {}
    exec(compile(text, "<comparison of calls>", "exec"), _NAMES, names)
    return names["compare"]


_NAMES: dict[str, Any] = {
    "same": same_constant, "state": torch_state, "grad": torch.is_grad_enabled,
    "autocast": is_any_autocast_enabled, "hooks": top_saved_tensors_hooks,
    "copysign": math.copysign,
}  # fmt: skip


class _Source:
    def __init__(self, trie: Trie, known: frozenset[int]):
        self._kinds = trie.kinds
        self._known = known
        self._seen: set[int] = set()
        self._lines: list[str] = []
        self._binds = False
        self.constants: list[Any] = []

    def text(self, is_plain: bool) -> str:
        state = "not (grad() is D[0] and not autocast() and hooks(False) is None)"
        lines = [
            "def compare(args, kwargs, V, D, S):",
            *(["    count = S.inputs"] if self._binds else []),
            f"    if {state if is_plain else 'state() != D[0]'}: return False",
            *self._lines,
            "    return True",
        ]
        text = "\n".join(lines)
        return text.replace("return False", "return S.unbind(count)") if self._binds else text

    def add_call(self, args: Items, kwargs: Items) -> None:
        self._require(f"len(args) == {len(args.items)}")
        for i, item in enumerate(args.items):
            name = f"args[{i}]"
            if type(item) is Items:
                self._lines.append(f"    a{i} = args[{i}]")
                name = f"a{i}"
            self._add(item, name)
        if kwargs.keys:
            self._add(kwargs, "kwargs")
        else:
            self._require("not kwargs")

    def _add(self, template: Any, expression: str) -> None:
        if type(template) is Ref:
            self._add_tensor(template.value, expression)
        elif type(template) is Number:
            self._require(f"type({expression}) is {self._constant(template.kind)}")
            value = f"{expression}.item()" if issubclass(template.kind, np.generic) else expression
            index = self._constant(template.index)
            self._lines.append(f"    S.trie.numbers[{index}] = {value}")
        elif type(template) is Items:
            self._add_items(template, expression)
        elif template is None or template is True or template is False:
            self._require(f"{expression} is {template}")
        elif type(template) is float and math.isfinite(template) and template:
            self._require(f"type({expression}) is float and {expression} == {template!r}")
        elif type(template) is float and template == 0:
            sign = math.copysign(1, template)
            self._require(
                f"type({expression}) is float and {expression} == 0 "
                f"and copysign(1, {expression}) == {sign}"
            )
        elif type(template) in (int, str):
            kind = type(template).__name__
            self._require(f"type({expression}) is {kind} and {expression} == {template!r}")
        else:
            self._require(f"same({self._constant(template)}, {expression})")

    def _add_tensor(self, number: int, expression: str) -> None:
        constant = self._constant(number)
        if number in self._known or self._kinds[number] == "slot" or number in self._seen:
            self._require(f"{expression} is V[{constant}]")
        else:
            self._seen.add(number)
            self._binds = True
            self._require(f"S.bind({constant}, {expression})")

    def _add_items(self, template: Items, expression: str) -> None:
        self._require(f"type({expression}) is {self._constant(template.kind)}")
        if template.kind is slice:
            parts = [f"{expression}.{name}" for name in ("start", "stop", "step")]
        elif template.kind is dict:
            self._require(f"tuple({expression}) == {self._constant(template.keys)}")
            parts = [f"{expression}[{self._constant(key)}]" for key in template.keys]
        else:
            self._require(f"len({expression}) == {len(template.items)}")
            parts = [f"{expression}[{i}]" for i in range(len(template.items))]
        for item, part in zip(template.items, parts, strict=True):
            if type(item) is Items:
                name = f"x{len(self._lines)}"
                self._lines.append(f"    {name} = {part}")
                part = name
            self._add(item, part)

    def _require(self, condition: str) -> None:
        self._lines.append(f"    if not ({condition}): return False")

    def _constant(self, value: Any) -> str:
        self.constants.append(value)
        return f"D[{_FIRST + len(self.constants) - 1}]"
