"""FX graphs to MLIR in the torch dialect, by IREE's own importer, and the element types it takes.

Weights that are to be prepared become parameters: globals of the program that get their values
when it is loaded, so that compiled code does not depend on them.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends.iree.compiler import make_importer, mlir

SCOPE = "weights"
"""Where programs look for their parameters."""

STRICT = "torch.assume_strict_symbolic_shapes"
"""Attribute of functions in which a size that varies is not one that is broadcast."""


@dataclass(frozen=True)
class Function:
    """A function of a program.

    Attributes:
        name: Under which it is called.
        graph: Functional ATen calls on static shapes. Only tensors are placeholders.
        parameters: Names of the placeholders that are parameters.
    """

    name: str
    graph: fx.Graph
    parameters: Sequence[str] = field(default=())


def translate(functions: Sequence[Function]) -> bytes:
    """Returns an MLIR module of functions, as bytecode.

    Raises:
        Exception: The importer cannot translate a call; its exceptions are of all kinds.
    """
    importer = make_importer()
    for function in functions:
        operation = importer.import_stateless_graph(function.graph, func_name=function.name)
        with operation.context:
            operation.attributes[STRICT] = mlir().UnitAttr.get()
        _bind_parameters(importer.module_op, operation, function)
    buffer = io.BytesIO()
    importer.module_op.operation.write_bytecode(buffer)
    return buffer.getvalue()


def _bind_parameters(module: Any, operation: Any, function: Function) -> None:
    """Turns arguments of a function into loads of parameters."""
    places = [n for n in function.graph.nodes if n.op == "placeholder"]
    block = operation.regions[0].blocks[0]
    wanted = {i: n.meta["val"] for i, n in enumerate(places) if n.name in function.parameters}
    ir = mlir()
    with operation.context, ir.Location.unknown():
        for i, value in wanted.items():
            argument = block.arguments[i]
            argument.replace_all_uses_with(_load(ir, module, block, places[i].name, value))
        for i in sorted(wanted, reverse=True):
            block.erase_argument(i)
        inputs = [argument.type for argument in block.arguments]
        kind = operation.attributes["function_type"].value
        operation.attributes["function_type"] = ir.TypeAttr.get(
            ir.FunctionType.get(inputs, kind.results)
        )


def _load(ir: Any, module: Any, block: Any, name: str, value: Tensor) -> Any:
    """Returns the value of a parameter, loaded at the begin of a function."""
    sizes = "".join(f"{size}x" for size in value.shape)
    builtin = f"tensor<{sizes}{PARAMETERS[value.dtype]}>"
    attribute = f'#flow.parameter.named<"{SCOPE}"::"{name}">'
    declared = ir.Operation.parse(f"util.global private @{name} = {attribute} : {builtin}")
    ir.InsertionPoint.at_block_begin(module.regions[0].blocks[0]).insert(declared)
    kind = ir.Type.parse(builtin)
    with ir.InsertionPoint.at_block_begin(block):
        loaded = ir.Operation.create(
            "util.global.load",
            results=[kind],
            attributes={"global": ir.FlatSymbolRefAttr.get(name)},
        )
    with ir.InsertionPoint.after(loaded):
        argument = ir.Type.parse(_vtensor(value))
        cast = ir.Operation.create(
            "torch_c.from_builtin_tensor", results=[argument], operands=[loaded.result]
        )
    return cast.result


def _vtensor(value: Tensor) -> str:
    sizes = ",".join(map(str, value.shape))
    return f"!torch.vtensor<[{sizes}],{PARAMETERS[value.dtype]}>"


DTYPES = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    }
)
"""What IREE computes with: not with unsigned 16 to 64 bits, float8 and quantized types."""

PARAMETERS = {
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
}
"""MLIR's names of the types that weights need to be worth preparing."""
