"""The other process of `isolation`: compiles, calls and verifies one candidate.

python -m dynamo_backends.autotune.rehearsal FOLDER
"""

import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, fx, nn

from dynamo_backends.autotune import serialization
from dynamo_backends.autotune.arguments import Arguments
from dynamo_backends.autotune.candidates import Candidate
from dynamo_backends.autotune.isolation import RESULT, TASK
from dynamo_backends.autotune.options import AutotuneOptions
from dynamo_backends.autotune.reference import precise_captured
from dynamo_backends.autotune.session import Subject
from dynamo_backends.autotune.training import differentiated
from dynamo_backends.autotune.verify import judge
from dynamo_backends.interface.errors import brief_error
from dynamo_backends.tuning.race import Run


def rebuilt(
    graph: fx.GraphModule,
    values: Sequence[Any],
    places: Collection[int],
    sizes: Mapping[int, Sequence[int]] = MappingProxyType({}),
) -> fx.GraphModule:
    """Returns the graph with weights that are parameters, as Dynamo had found it.

    Dynamo makes inputs in the order in which it comes upon them, which is the old one here, so that
    what is compiled of the graph has the same name in the disk cache.

    Args:
        graph: The graph.
        values: Its inputs.
        places: Which of them are weights.
        sizes: Which of them are sizes: of which other one, and of which dimension. They are no
            inputs of the result.
    """
    root, made = nn.Module(), fx.Graph()
    for name, buffer in graph.named_buffers():
        root.register_buffer(name, buffer)
    nodes: dict[fx.Node, fx.Node] = {}
    placeholders = graph.graph.find_nodes(op="placeholder")
    for i, (node, value) in enumerate(zip(placeholders, values, strict=True)):
        if i in places:
            weight = nn.Parameter(value.detach(), value.requires_grad)
            root.register_parameter(f"weight_{i}", weight)
            nodes[node] = made.get_attr(f"weight_{i}")
            continue
        if i in sizes:
            continue
        nodes[node] = made.placeholder(f"activation_{i}")
        if isinstance(value, Tensor):
            made.call_method("dim", (nodes[node],))  # Dynamo comes upon an argument when it is used
    for i, (tensor, dim) in sizes.items():
        nodes[placeholders[i]] = made.call_method("size", (nodes[placeholders[tensor]], dim))
    made.output(made.graph_copy(graph.graph, nodes))
    return fx.GraphModule(root, made)


def main(folder: Path) -> None:
    """Carries out the task in a folder, and writes there what was found."""
    task = json.loads((folder / TASK).read_text(encoding="utf-8"))
    graph, values = serialization.read(folder)
    problem = try_out(graph, values, task)
    (folder / RESULT).write_text(json.dumps({"problem": problem}), encoding="utf-8")


def read_options(given: dict[str, Any]) -> AutotuneOptions:
    """Options that were JSON."""
    settings: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    return AutotuneOptions(**settings)


def try_out(graph: fx.GraphModule, values: list[Any], task: dict[str, Any]) -> str:
    """What goes wrong when a candidate compiles and runs a graph; "" if nothing does."""
    candidate = Candidate(**task["candidate"])
    options = read_options(task["options"])
    uncopied = frozenset(task["uncopied"])
    adapt: Callable[[Callable[..., Any]], Run] = differentiated if task["training"] else _plain

    def compile_captured(captured: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return candidate.compile(captured, inputs, options)

    module = rebuilt(graph, values, uncopied)
    compiled = torch.compile(module, backend=compile_captured)
    outputs: Any = graph.graph.output_node().args[0]
    subject = Subject(
        adapt(graph.forward),
        adapt(precise_captured(graph)),
        Arguments(values, uncopied, task["mutated"]),
        outputs=len(outputs) if task["training"] else None,
    )
    with torch.set_grad_enabled(task["training"]):
        trials = subject.trials()
        run = adapt(lambda *args: compiled(*(a for i, a in enumerate(args) if i not in uncopied)))
        try:
            verdict = judge(trials, run, candidate.reduced)
        except Exception as error:
            return f"failed in a process of its own: {brief_error(error)}"
    return f"wrong: {verdict.wrong}" if verdict.wrong else ""


def _plain(compiled: Callable[..., Any]) -> Run:
    return lambda args: compiled(*args)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
