"""Defines the normal form: a functional, decomposed ATen graph with roles of inputs.

A graph in normal form has only placeholders, `call_function` nodes and one output node. Tensor
constants have become placeholders with the role CONSTANT. Every node's `meta["val"]` tells shape,
strides, dtype and device.
"""

import enum
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from dynamo_backends._torch_private import OpOverload, lazy_graph_module
from dynamo_backends.graph.call_arguments import collect_tensors
from dynamo_backends.interface.errors import DeviceError
from dynamo_backends.interface.mesh import InputPlacement
from dynamo_backends.interface.report import Kind


class Role(enum.Enum):
    """The kind of an input: activation, parameter, buffer, constant, symbol and others."""

    ACTIVATION = "activation"  # differs from call to call
    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"  # owned by the graph itself
    MUTATED = "mutated"  # a parameter or buffer that the graph itself updates
    TANGENT = "tangent"
    SAVED = "saved"  # handed from the forward to the backward graph
    SYMBOL = "symbol"  # a symbolic integer
    INTERMEDIATE = "intermediate"  # made by another part of the same captured graph
    OPTIMIZER_STATE = "optimizer state"  # these three: of whole training steps only
    GRADIENT = "gradient"
    HYPERPARAMETERS = "hyperparameters"


WEIGHT_ROLES = frozenset({Role.PARAMETER, Role.BUFFER, Role.CONSTANT})


@dataclass(frozen=True)
class Input:
    """One placeholder: its role, whether it is frozen, and which output updates it.

    Attributes:
        name: Name of the placeholder.
        role: What it is.
        frozen: The backend may prepare its value once (see `Options.freezing`).
        updated_by: Position of the output that takes its place. In a "step" graph, and in a block
            of an inference graph, the input's memory is donated to it. None: the input stays as it
            is.
        placed: Where it is on a mesh of devices (see `Backend.placements`); None: nothing is said.
    """

    name: str
    role: Role
    frozen: bool = False
    updated_by: int | None = None
    placed: InputPlacement | None = None


@dataclass(frozen=True)
class Graph:
    """An FX graph, or a part of one, in normal form, with its kind and input roles.

    Attributes:
        module: Holds the FX graph.
        kind: "inference", "forward" or "backward"; "step" for a whole training step.
        inputs: One entry per placeholder, in order.
    """

    module: fx.GraphModule
    kind: Kind
    inputs: tuple[Input, ...]

    def copy(self) -> "Graph":
        """Copies the nodes, so that the copy may be changed; `meta` values are shared."""
        module = lazy_graph_module(self.module, copy_graph(self.module.graph))
        return Graph(module, self.kind, self.inputs)

    @property
    def placeholders(self) -> list[fx.Node]:
        """Returns the placeholder nodes, in order, one per entry of `inputs`."""
        return [n for n in self.module.graph.nodes if n.op == "placeholder"]

    @property
    def calls(self) -> list[fx.Node]:
        """Returns the `call_function` nodes, in topological order."""
        return [n for n in self.module.graph.nodes if n.op == "call_function"]

    @property
    def outputs(self) -> Sequence[Any]:
        """Returns what the output node returns: nodes, None, or Python numbers."""
        results: Any = self.module.graph.output_node().args[0]
        return tuple(results)

    def text(self) -> str:
        """Formats the graph for people, one line per node (see `format_graph`)."""
        return format_graph(self.module.graph, self.inputs)

    @property
    def weights(self) -> list[int]:
        """Returns positions of the frozen inputs: those prepared once, not for each call."""
        return [i for i, x in enumerate(self.inputs) if x.frozen]

    @property
    def activations(self) -> list[int]:
        """Returns positions of the inputs that are not frozen and come with every call."""
        return [i for i, x in enumerate(self.inputs) if not x.frozen]

    @property
    def updates(self) -> dict[int, int]:
        """Maps positions of updated inputs to positions of the outputs with the new contents."""
        return {i: x.updated_by for i, x in enumerate(self.inputs) if x.updated_by is not None}


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """Copies an FX graph with the same node names; `meta` values are shared."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    copy.output_node().meta = dict(graph.output_node().meta)
    return copy


def eliminate_dead_calls(graph: fx.Graph) -> bool:
    """Eliminates calls without users, except random draws; returns whether there were any.

    Returns:
        Whether there were any.
    """
    return graph.eliminate_dead_code(is_impure_node=fx.Node.is_impure)


def erase_unused_calls(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Erases those of the given calls, and of their inputs, that have no users.

    Looking through the whole graph would take longer than decomposing a call.
    """
    waiting = dict.fromkeys(nodes)
    while waiting:
        node, _ = waiting.popitem()
        if node.op == "call_function" and not node.users and not node.is_impure():
            waiting |= dict.fromkeys(node.all_input_nodes)
            graph.erase_node(node)


def source_line(node: fx.Node) -> str | None:
    """Returns the user's line that a node comes from, "file:line, code"; None if unknown."""
    trace = node.meta.get("stack_trace")
    if not trace:
        return None
    lines = [line.strip() for line in trace.strip().splitlines()]
    for i in range(len(lines) - 1, -1, -1):
        if lines[i].startswith("File "):
            place = lines[i].removeprefix("File ").split(", in ")[0]
            file, _, number = place.partition(", line ")
            code = f", {lines[i + 1]}" if i + 1 < len(lines) else ""
            return f"{file.strip(chr(34))}:{number}{code}"
    return None


def user_lines(graph: fx.Graph, most: int = 12) -> tuple[str, ...]:
    """Returns the user's lines that most of a graph's calls come from, "file:line, code".

    Args:
        graph: A captured or functional graph.
        most: Largest number of them.

    Returns:
        Each as "file:line, code".
    """
    lines = (source_line(node) for node in graph.nodes if node.op.startswith("call_"))
    return tuple(line for line, _ in Counter(filter(None, lines)).most_common(most))


def find_input_off_device(graph: Graph, kind: str) -> Tensor | None:
    """Returns the first input on another device type, 0-d tensors aside; None if none is."""
    for node in graph.placeholders:
        value = node.meta["val"]
        if isinstance(value, Tensor) and value.device.type != kind and value.ndim:
            return value
    return None


def find_device_index(nodes: Iterable[fx.Node], kind: str) -> int | None:
    """Returns the index of the first device of a type among nodes' tensors; else None."""
    found = (
        t.device for n in nodes for t in collect_tensors(n.meta.get("val")) if t.device.type == kind
    )
    device = next(found, None)
    return None if device is None else device.index or 0


def require_cpu_inputs(graph: Graph, backend: str, more: str = "") -> None:
    """Raises `DeviceError` if an input of at least one dimension is not on the CPU.

    Args:
        graph: The graph.
        backend: Its name.
        more: What else to say of what can be done.
    """
    found = find_input_off_device(graph, "cpu")
    if found is not None:
        raise DeviceError(
            f"{backend} supports only CPU tensors, but an input is on {found.device.type}. Move "
            f"the model and its inputs to the CPU.{more}"
        )


def cuda_unavailable_reason() -> str | None:
    """Returns why torch has no CUDA device; None if it has one."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return None


def format_graph(graph: fx.Graph, inputs: Sequence[Input] = ()) -> str:
    """Formats an FX graph as text, one line per node, with dtypes and shapes.

    Args:
        graph: The graph.
        inputs: Roles of its placeholders, if known.

    Examples:
        >>> print(format_graph(graph))
        graph(x: float32[3, 4])
          mul: float32[3, 4] = aten.mul.Tensor(x, 2)
          permute: float32[4, 3] strides (1, 4) = aten.permute.default(mul, [1, 0])
          return permute
    """
    known = {x.name: x for x in inputs}
    places = [n for n in graph.nodes if n.op == "placeholder"]
    lines = [_head(places, known)]
    lines += [f"  {_line(n)}" for n in graph.nodes if n.op not in ("placeholder", "output")]
    results = graph.output_node().args[0]
    single = not isinstance(results, list | tuple)
    shown = [results] if single else results
    lines.append(f"  return {', '.join(map(_argument, shown))}")  # type: ignore[arg-type]
    return "\n".join(lines)


def describe_value(value: Any) -> str:
    """Formats dtype and shape, and strides of tensors that are not contiguous."""
    if isinstance(value, Tensor):
        shape = f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
        strides = "" if value.is_contiguous() else f" strides {tuple(value.stride())}"
        return shape + strides
    if isinstance(value, list | tuple):
        return f"({', '.join(map(describe_value, value))})"
    return type(value).__name__ if isinstance(value, torch.SymInt) else repr(value)


def _head(places: list[fx.Node], known: Mapping[str, "Input"]) -> str:
    shown = [f"{p.name}: {_input(p, known)}" for p in places]
    line = f"graph({', '.join(shown)})"
    return line if len(line) <= 100 else "graph(\n    " + ",\n    ".join(shown) + "\n  )"


def _input(place: fx.Node, known: Mapping[str, "Input"]) -> str:
    text = describe_value(_value(place))
    if place.name in known:
        x = known[place.name]
        text += f" {x.role.value}" + (" frozen" if x.frozen else "")
    return text


def _value(node: fx.Node) -> Any:
    return node.meta.get("val", node.meta.get("example_value"))


def _line(node: fx.Node) -> str:
    value = _value(node)
    kind = "" if value is None else f": {describe_value(value)}"
    return f"{node.name}{kind} = {_call(node)}"


def _call(node: fx.Node) -> str:
    if node.op == "get_attr":
        return f"self.{node.target}"
    if node.target is operator.getitem:
        return f"{_argument(node.args[0])}[{_argument(node.args[1])}]"
    args = [_argument(a) for a in node.args]
    args += [f"{name}={_argument(a)}" for name, a in node.kwargs.items()]
    if node.op == "call_method":
        return f"{args[0]}.{node.target}({', '.join(args[1:])})"
    return f"{_target(node)}({', '.join(args)})"


def _target(node: fx.Node) -> str:
    if isinstance(node.target, OpOverload | str):
        return str(node.target)
    return getattr(node.target, "__name__", str(node.target))


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_argument, value))}]"
    if isinstance(value, torch.device):
        return repr(str(value))
    return str(value) if isinstance(value, torch.dtype) else repr(value)
