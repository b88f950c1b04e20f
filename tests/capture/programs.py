"""What the tests of capture share: a compiler that counts, and the state that must not change."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._C._dynamo.eval_frame import get_eval_frame_callback


class Counting:
    """A compiler that runs graphs as they are, and keeps them."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs.append(gm)
        return gm.forward

    @property
    def count(self) -> int:
        return len(self.graphs)

    def operators(self) -> list[str]:
        """Names of the calls in all graphs, in order."""
        nodes = [n for gm in self.graphs for n in gm.graph.nodes if n.op.startswith("call_")]
        return [n.target if isinstance(n.target, str) else n.target.__name__ for n in nodes]


def toy(a: Tensor, b: Tensor) -> Tensor:
    x = a + b
    x = x / 2.0
    if x.sum() < 0:
        return x * -1.0
    return x


def wave(x: Tensor) -> Tensor:
    return torch.sin(x) + 1


def state() -> dict[str, Any]:
    """Everything that a scope could leave changed in this thread and in Dynamo."""
    import torch._dynamo.output_graph

    config = torch._dynamo.config.get_config_copy()
    return {
        "callback": get_eval_frame_callback(),
        "stance": repr(torch._dynamo.eval_frame._stance),
        "graphs": torch._dynamo.output_graph.OutputGraph.call_user_compiler,
        "hooks": list(torch._dynamo.convert_frame._bytecode_hooks),
        "modes": torch._C._len_torch_dispatch_stack(),
        "config": {name: repr(value) for name, value in config.items()},
    }
