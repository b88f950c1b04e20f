"""The portable form: a functional graph of ATen calls with the names of its weights."""

import ast
import contextlib
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from dynamo_backends.aot.inputs import CapturedInput, CaptureFacts
from dynamo_backends.graph.graph import Role
from dynamo_backends.interface.errors import PackageError, SaveError, brief_error
from dynamo_backends.package.checks import check_program


def unproven(model: nn.Module, exported: Any, guards: Sequence[str]) -> list[str]:
    """Returns the export guards that the symbolic shapes do not imply, as text.

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
        """Returns the sizes, with expressions where they vary."""
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
    """Returns whether the two sides of `!=` differ for all values of the symbols."""
    if not isinstance(code, ast.Compare) or not isinstance(code.ops[0], ast.NotEq):
        return False
    left, right = (_value(side, arguments) for side in (code.left, *code.comparators))
    return sympy.simplify(left - right).is_nonzero is True


def _value(code: ast.expr, arguments: Any) -> Any:
    """Returns the value of an expression of arguments' sizes, which may be symbols."""
    compiled = compile(ast.Expression(code), "<guard>", "eval")
    return eval(compiled, {"__builtins__": {}}, {"L": arguments})


aten = torch.ops.aten

# Checks of what the graph's fake tensors promise: they compute nothing.
_CHECKS = frozenset((aten._assert_scalar.default, aten._assert_tensor_metadata.default))
_ROLES = {"PARAMETER": Role.PARAMETER, "BUFFER": Role.BUFFER, "CONSTANT_TENSOR": Role.BUFFER}


@dataclass(frozen=True)
class Portable:
    """A graph that every machine with torch can run.

    Attributes:
        module: The graph; its inputs are the weights, then the leaves of the arguments.
        weights: Names of the weights, in order.
        facts: What is known of all inputs.
        leaves: For each leaf of the arguments what it was when the model was exported: a fake
            tensor, a symbolic number, or the one value that it may have.
        given: Which leaves are inputs of the graph.
    """

    module: fx.GraphModule
    weights: tuple[str, ...]
    facts: CaptureFacts
    leaves: tuple[Any, ...]
    given: tuple[int, ...]

    @property
    def places(self) -> list[fx.Node]:
        """Returns the places of the inputs."""
        return list(self.module.graph.find_nodes(op="placeholder"))

    def in_eager(self, values: list[Any]) -> Sequence[Any]:
        """Runs the graph call by call; clears the list of inputs."""
        results: Sequence[Any] = self.module(*values)
        values.clear()
        return results


def exported(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
    rules: Mapping[Any, Any],
) -> Any:
    """Returns the model as torch's exported program, functional and decomposed.

    Raises:
        SaveError: It cannot be exported, or updates its buffers or inputs.
    """
    from dynamo_backends._torch_private.exported import export_functional, guards_of

    try:
        made = export_functional(model, args, kwargs, dynamic_shapes, rules)
    except Exception as error:
        raise SaveError(
            f"torch.export cannot capture {type(model).__name__} as one graph: {brief_error(error)}"
        ) from error
    guards = unproven(model, made, guards_of(made))
    if guards:
        raise SaveError(
            f"the graph is valid only if {'; '.join(guards[:3])}. Give dynamic_shapes as "
            "torch.export.Dim with minimum and maximum sizes for which this holds."
        )
    updated = sorted(
        str(spec.target or getattr(spec.arg, "name", ""))
        for spec in made.graph_signature.output_specs
        if spec.kind.name != "USER_OUTPUT"
    )
    if updated:
        raise SaveError(
            f"the model updates {', '.join(updated[:5])} in each call, which packages do not "
            "support. Call model.eval() before saving, or return the new values."
        )
    for node in [n for n in made.graph.nodes if n.target in _CHECKS]:
        made.graph.erase_node(node)
    made.graph.eliminate_dead_code()
    return made


def to_dict(made: Any) -> dict[str, Any]:
    """Returns an exported program, or a graph of static sizes, in types that JSON has.

    Raises:
        SaveError: It calls what is no operator, or has shapes that depend on guards.
    """
    from dynamo_backends._torch_private.exported import graph_to_dict, program_to_dict

    try:
        program = (graph_to_dict if isinstance(made, fx.GraphModule) else program_to_dict)(made)
        check_program(program)
    except PackageError as error:
        raise SaveError(f"the graph cannot be saved: {error}") from error
    except Exception as error:
        raise SaveError(f"torch cannot serialize the graph: {brief_error(error)}") from error
    return program


def from_dict(program: Mapping[str, Any]) -> Portable:
    """Returns the graph of a model from `to_dict`.

    Raises:
        PackageError: It is damaged, or of a torch whose form this one cannot read.
    """
    with _reading(program) as read:
        return _portable(*read())


def module_of(program: Mapping[str, Any]) -> fx.GraphModule:
    """Returns a graph of static sizes from `to_dict`, with fake tensors. See `from_dict`."""
    with _reading(program) as read:
        module, _ = read()
        return module


@contextlib.contextmanager
def _reading(program: Mapping[str, Any]) -> Iterator[Callable[[], tuple[fx.GraphModule, Any]]]:
    from dynamo_backends._torch_private.exported import program_from_dict

    try:
        check_program(program)
        yield lambda: program_from_dict(program)
    except PackageError:
        raise
    except Exception as error:
        raise PackageError(
            f"torch {torch.__version__} cannot read the graph, which torch "
            f"{program.get('torch_version')} wrote: {brief_error(error)}"
        ) from error


def _portable(module: fx.GraphModule, signature: Any) -> Portable:
    weights: list[str] = []
    inputs: list[CapturedInput] = []
    leaves: list[Any] = []
    given: list[int] = []
    places = {place.name: place for place in module.graph.find_nodes(op="placeholder")}
    for spec in signature.input_specs:
        if spec.kind.name == "USER_INPUT":
            place = places.get(spec.arg.name)
            leaf = spec.arg.value if place is None else _leaf(place, spec.arg)
            if isinstance(leaf, Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
                given.append(len(leaves))
                inputs.append(CapturedInput(spec.arg.name, None, symbols=_symbols(leaf)))
            elif place is not None:
                place.replace_all_uses_with(leaf)
                module.graph.erase_node(place)
            leaves.append(leaf)
        elif spec.kind.name in _ROLES and not leaves:
            weights.append(spec.target)
            inputs.append(CapturedInput(f"self.{spec.target}", _ROLES[spec.kind.name]))
        else:
            raise PackageError(f"the graph has an input of unsupported kind {spec.kind.name}")
    for i, place in enumerate(module.graph.find_nodes(op="placeholder")):
        _renumber(place, i)
    _drop_unused(module)
    facts = CaptureFacts(tuple(inputs), ())
    return Portable(module, tuple(weights), facts, tuple(leaves), tuple(given))


def _leaf(place: fx.Node, argument: Any) -> Any:
    value = place.meta.get("val")
    return getattr(argument, "value", value) if not isinstance(value, Tensor) else value


def _renumber(place: fx.Node, index: int) -> None:
    from dynamo_backends._torch_private.exported import describe_input

    describe_input(place, index)


def _drop_unused(module: fx.GraphModule) -> None:
    for node in reversed(
        list(module.graph.find_nodes(op="call_function", target=operator.getitem))
    ):
        if not node.users:
            module.graph.erase_node(node)
    module.recompile()


def _symbols(value: Any) -> tuple[str, ...]:
    sizes = value.shape if isinstance(value, Tensor) else ()
    return tuple(
        str(n) if isinstance(n, torch.SymInt) and n.node.expr.is_Symbol else "" for n in sizes
    )
