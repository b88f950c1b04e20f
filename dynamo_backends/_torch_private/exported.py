"""Exported programs as JSON, without the parts of torch's own format that are pickled.

Imported apart: it loads torch.export.

| what | checked |
|---|---|
| `torch._export.serde.serialize`: `serialize`, `_Union` | 2.13* |
| `torch._export.serde.serialize`: `GraphModuleSerializer`, `_to_json_bytes` | 2.13 |
| `torch._export.serde.serialize`: `GraphModuleDeserializer`, `_int_to_sympy_int` | 2.13* |
| `torch._export.serde.schema.ExportedProgram`, `ExportedProgram._guards_code` | 2.13* |
| `torch._functorch._aot_autograd.descriptors.PlainAOTInput` | 2.11+ |
| `torch.export.default_decompositions` | 2.11+ |
"""

import copy
import dataclasses
import inspect
import json
import types
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import fx, nn
from torch._export.serde import schema, serialize
from torch._functorch._aot_autograd.descriptors import PlainAOTInput
from torch.export import ExportedProgram, default_decompositions
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)
from torch.fx.experimental.symbolic_shapes import ValueRanges

from dynamo_backends._torch_private.forks import fork_safe_lock
from dynamo_backends._torch_private.operators import is_composite
from dynamo_backends._torch_private.regions import without_regions

_LEFT_OUT: dict[str, Any] = {
    name: False
    for name in ("serialize_state_dict", "serialize_constants", "serialize_example_inputs")
    if name in inspect.signature(serialize.serialize).parameters
}
"""What is not to be written; torch 2.11 writes it nevertheless, and it is thrown away here."""

_lock = fork_safe_lock()
"""torch reads one graph at a time, in the whole process."""


def export_functional(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
    rules: Mapping[Any, Callable[..., Any]],
) -> ExportedProgram:
    """Exports a model as a functional ATen graph whose weights are inputs.

    Args:
        model: What is traced.
        args: Arguments of one call.
        kwargs: Keyword arguments of it.
        dynamic_shapes: As for `torch.export.export`.
        rules: How operators are decomposed that are not composite; those always are.
    """
    with torch.no_grad(), without_regions(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13, of classes of its own
        warnings.simplefilter("ignore", DeprecationWarning)
        exported = torch.export.export(
            model, tuple(args), dict(kwargs), dynamic_shapes=dynamic_shapes, strict=False
        )
        composite = {op: rule for op, rule in default_decompositions().items() if is_composite(op)}
        return exported.run_decompositions({**composite, **rules})


def guards_of(exported: ExportedProgram) -> list[str]:
    """Returns an exported program's size assumptions beyond ranges, as Python code."""
    return list(exported._guards_code)


def program_to_dict(exported: ExportedProgram) -> dict[str, Any]:
    """Returns graph, signature and symbol ranges of a program as JSON types.

    Weights, example inputs, source lines and code of guards are left out.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        artifact = serialize.serialize(exported, **_LEFT_OUT)
    return _stripped(artifact.exported_program)


def graph_to_dict(module: fx.GraphModule) -> dict[str, Any]:
    """Returns a functional graph of tensors in the form of `program_to_dict`."""
    module = copy.deepcopy(module)
    for node in module.graph.nodes:
        node.meta = {"val": node.meta["val"]} if "val" in node.meta else {}
    results: Any = module.graph.output_node().args[0]
    inputs = [
        InputSpec(InputKind.USER_INPUT, TensorArgument(place.name), None)
        for place in module.graph.find_nodes(op="placeholder")
    ]
    outputs = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(x.name), None) for x in results]
    signature = ExportGraphSignature(inputs, outputs)
    written = serialize.GraphModuleSerializer(signature, []).serialize(module)
    version = schema.SchemaVersion(*schema.SCHEMA_VERSION)
    program = schema.ExportedProgram(written, {}, {}, version, [], torch.__version__, [])
    return _stripped(serialize._to_json_bytes(program))


def _stripped(program: bytes) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(program)
    made["guards_code"] = []
    made["graph_module"]["module_call_graph"] = []
    made["graph_module"]["treespec_namedtuple_fields"] = {}
    for node in made["graph_module"]["graph"]["nodes"]:
        node["metadata"] = {}
    return made


def program_from_dict(program: Mapping[str, Any]) -> tuple[fx.GraphModule, Any]:
    """Rebuilds a graph with fake tensors, and its signature, from `program_to_dict`.

    What is executed of it is looked up by name: the caller checks the names before.
    """
    known: Any = _typed(schema.ExportedProgram, program)
    ranges = {
        name: ValueRanges(
            serialize._int_to_sympy_int(each.min_val, -serialize.int_oo),
            serialize._int_to_sympy_int(each.max_val, serialize.int_oo),
        )
        for name, each in known.range_constraints.items()
    }
    with _lock:
        reader = serialize.GraphModuleDeserializer()
        found = reader.deserialize(known.graph_module, {}, {}, None, ranges)
    return found.graph_module, found.signature


def _typed(hint: Any, data: Any) -> Any:
    """Converts JSON to torch's schema dataclasses, faster than torch's own function.

    As torch's `_dict_to_dataclass`, which evaluates the hints of a class for each of its objects:
    most of the time that loading a graph takes.
    """
    if typing.get_origin(hint) is Annotated:
        return _typed(hint.__origin__, data)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return None if data is None else _typed(typing.get_args(hint)[0], data)
    if isinstance(hint, type) and issubclass(hint, serialize._Union):
        ((name, value),) = data.items()
        return hint.create(**{name: _typed(_hints(hint)[name], value)})
    if dataclasses.is_dataclass(hint):
        known = _hints(hint)
        fields = {n: _typed(known[n], value) for n, value in data.items() if n in known}
        made: Any = hint
        return made(**fields)
    if isinstance(data, list):
        return [_typed(typing.get_args(hint)[0], each) for each in data]
    if isinstance(data, dict):
        return {name: _typed(typing.get_args(hint)[1], each) for name, each in data.items()}
    return float(data) if hint is float else data


def _hints(cls: Any) -> dict[str, Any]:
    if cls not in _known_hints:
        _known_hints[cls] = typing.get_type_hints(cls, globalns=vars(schema))
    return _known_hints[cls]


_known_hints: dict[Any, dict[str, Any]] = {}


def describe_input(place: fx.Node, index: int) -> None:
    """Writes an input's index into a placeholder's `desc`, as AOT Autograd does."""
    place.meta["desc"] = PlainAOTInput(index)
