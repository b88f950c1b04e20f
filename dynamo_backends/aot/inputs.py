"""Analyses a captured graph's inputs: names, shared memory, in-place updates, roles."""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends.graph.graph import WEIGHT_ROLES, Graph, Input, Role, source_line
from dynamo_backends.interface.options import Options
from dynamo_backends.interface.report import InputReport


@dataclass(frozen=True)
class CapturedInput:
    """One input of the graph that Dynamo captured.

    Attributes:
        name: As in the user's code: "x", "self.fc.weight".
        shares_memory_with: Names of other inputs with memory in common.
        mutated_at: The user's lines that write to this memory in place.
        role: PARAMETER or BUFFER for those of a module, else None.
        symbols: The symbol that each size is; empty where it is a number or an expression.
    """

    name: str
    role: Role | None = None
    shares_memory_with: tuple[str, ...] = ()
    mutated_at: tuple[str, ...] = ()
    symbols: tuple[str, ...] = ()


@dataclass(frozen=True)
class CaptureFacts:
    """The facts about a graph that Dynamo captured, before AOT Autograd made it functional.

    Attributes:
        inputs: One per input.
        output_aliases: Which outputs share memory with what, in words.
    """

    inputs: tuple[CapturedInput, ...]
    output_aliases: tuple[str, ...]

    @property
    def symbols(self) -> dict[str, tuple[str, ...]]:
        """The symbols of the inputs' sizes, by the inputs' names."""
        return {x.name: x.symbols for x in self.inputs}


def inspect_captured(captured: fx.GraphModule) -> CaptureFacts:
    """Looks at names, memory and in-place calls in a graph of Dynamo's.

    Memory is told apart by the storages of the fake tensors with which Dynamo traced the graph.
    """
    places = [n for n in captured.graph.nodes if n.op == "placeholder"]
    names = [_name(p) for p in places]
    storages = [_storage(p) for p in places]
    writes = _writes(captured.graph)
    inputs = []
    for place, name, storage in zip(places, names, storages, strict=True):
        others = [n for n, s in zip(names, storages, strict=True) if s == storage and n != name]
        shared = tuple(others) if storage is not None else ()
        lines = tuple(dict.fromkeys(line for s, line in writes if s == storage and s is not None))
        role, symbols = _module_role(place), _symbols(place)
        inputs.append(CapturedInput(name, role, shared, lines, symbols))
    return CaptureFacts(tuple(inputs), _output_aliases(captured, names, storages))


def describe_inputs(
    graph: Graph, captured: CaptureFacts, options: Options
) -> tuple[InputReport, ...]:
    """Returns one entry per input of a functional graph made of what Dynamo captured."""
    mutated = private.updated_inputs(graph.module.graph)
    return tuple(
        _describe(place, given, graph.kind, captured, mutated, options)
        for place, given in zip(graph.placeholders, graph.inputs, strict=True)
    )


def value_text(value: Any) -> str:
    """Data type and shape of a value, such as "float32[3, 4]"."""
    if not isinstance(value, Tensor):
        return str(value)
    return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"


_STEPS = (
    (re.compile(r"\b[LG]\['(\w+)'\]"), r"\1"),
    (re.compile(r"\.?_(?:modules|parameters|buffers)\['([^']+)'\]"), r".\1"),
)


def user_expression(expression: str) -> str:
    """Rewrites one of Dynamo's source expressions as user code, such as "self.fc.weight"."""
    for pattern, replacement in _STEPS:
        expression = pattern.sub(replacement, expression)
    return expression


def _describe(
    place: fx.Node,
    given: Input,
    kind: str,
    captured: CaptureFacts,
    mutated: Mapping[int, Any],
    options: Options,
) -> InputReport:
    index = private.view_base_input_index(place)
    known = captured.inputs[index] if index is not None and index < len(captured.inputs) else None
    name = known.name if known is not None else given.name
    shared = known.shares_memory_with if known is not None else ()
    if known is not None and not private.is_dynamo_input(place):
        name, shared = f"the memory of {', '.join((known.name, *shared))}", ()
    is_mutated = index in mutated and kind != "backward"
    lines = known.mutated_at if known is not None and is_mutated else ()
    if index is not None and is_mutated and not lines:  # by an operator that is not in-place
        content = mutated[index]
        line = source_line(content) if isinstance(content, fx.Node) else None
        lines = (line,) if line is not None else ()
    value = value_text(place.meta.get("val"))
    role = given.role
    if known is not None and known.role is not None and kind != "backward":
        # in inference AOT Autograd's graphs do not tell parameters from buffers
        role = role if role is Role.MUTATED else known.role
    reason = "" if given.frozen else _why_not_frozen(given.role, role, kind, options)
    return InputReport(name, role.value, value, given.frozen, reason, is_mutated, lines, shared)


def _why_not_frozen(treated_as: Role, role: Role, kind: str, options: Options) -> str:
    if role is Role.MUTATED:
        return "the graph updates it in place"
    if role not in WEIGHT_ROLES:
        return ""
    if kind != "inference":
        return "weights are not frozen in training graphs"
    if options.freezing == "off":
        return 'the option freezing is "off"'
    if treated_as is Role.ACTIVATION:
        return "AOTAutograd does not guarantee that every call gets the same tensor"
    return ""


def _name(place: fx.Node) -> str:
    source = private.dynamo_source_name(place)
    return str(place.target) if source is None else user_expression(source)


def _module_role(place: fx.Node) -> Role | None:
    source = private.dynamo_source_name(place) or ""
    if "._parameters[" in source:
        return Role.PARAMETER
    return Role.BUFFER if "._buffers[" in source else None


def _storage(node: Any) -> int | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return private.storage_id(value) if isinstance(value, Tensor) else None


def _symbols(place: fx.Node) -> tuple[str, ...]:
    value = place.meta.get("example_value")
    sizes = value.shape if isinstance(value, Tensor) else ()
    return tuple(
        str(n) if isinstance(n, torch.SymInt) and n.node.expr.is_Symbol else "" for n in sizes
    )


_IN_PLACE = frozenset(
    getattr(operator, name)
    for name in (
        *("iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow"),
        *("iand", "ior", "ixor", "ilshift", "irshift", "setitem"),
    )
)


def _writes(graph: fx.Graph) -> list[tuple[int | None, str]]:
    """Returns the storage that each in-place call writes to, and the user's line."""
    found: list[tuple[int | None, str]] = []
    for node in graph.nodes:
        if node.op in ("call_function", "call_method"):
            line = source_line(node) or ""
            found += [(_storage(target), line) for target in written_operands(node)]
    return [(storage, line) for storage, line in found if line]


def written_operands(node: fx.Node) -> Sequence[Any]:
    """Returns what a call of a captured graph writes to, as its name and arguments say."""
    if node.kwargs.get("out") is not None:
        out: Any = node.kwargs["out"]
        return out if isinstance(out, list | tuple) else (out,)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = node.target in _IN_PLACE or node.kwargs.get("inplace") is True
    in_place = in_place or (name.endswith("_") and not name.endswith("__"))
    return node.args[:1] if in_place else ()


def _output_aliases(
    captured: fx.GraphModule, names: Sequence[str], storages: Sequence[int | None]
) -> tuple[str, ...]:
    outputs: Any = captured.graph.output_node().args[0]
    texts: list[str] = []
    seen: dict[int, int] = {}
    for i, output in enumerate(outputs if isinstance(outputs, list | tuple) else (outputs,)):
        storage = _storage(output)
        if storage is None:
            continue
        owners = [n for n, s in zip(names, storages, strict=True) if s == storage]
        if owners:
            texts.append(f"output {i} shares memory with {', '.join(owners)}")
        elif storage in seen:
            texts.append(f"output {i} shares memory with output {seen[storage]}")
        else:
            seen[storage] = i
    return tuple(texts)


def subclass_inputs(example_inputs: Sequence[Any]) -> tuple[int, ...]:
    """Returns positions of inputs of Tensor subclasses that AOT Autograd does not unwrap."""
    return tuple(i for i, x in enumerate(example_inputs) if _is_of_subclass(x))


def wrap_for_subclass_inputs(
    compiled: Callable[..., Any], places: Sequence[int]
) -> Callable[..., Any]:
    """Wraps a compiled graph so that tensor-subclass inputs reach it as plain tensors.

    Dynamo guards the inputs' types, so those of the first call are those of all calls. Runtimes are
    given plain tensors of the same memory.

    Args:
        compiled: The graph.
        places: See `subclass_inputs`.
    """

    def call(*args: Any) -> Any:
        given = list(args)
        for i in places:
            given[i] = given[i].as_subclass(Tensor)
        return compiled(*given)

    return call


def _is_of_subclass(value: Any) -> bool:
    """Returns whether a value is a tensor of a subclass that AOT Autograd does not decompose."""
    if not isinstance(value, Tensor) or type(value) in (Tensor, torch.nn.Parameter):
        return False
    fake = isinstance(value, private.FakeTensor)
    return not fake and not private.is_traceable_wrapper_subclass(value)
