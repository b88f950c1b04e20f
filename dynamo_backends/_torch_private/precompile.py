"""Wraps torch's precompilation, which keeps compiled functions for later processes.

Imported apart, and only where torch is going to keep something: it loads Inductor's output types.

| what | checked |
|---|---|
| `torch._inductor.output_code.OutputCode` | 2.11+ |
| `torch._guards.TracingContext.fake_mode` | 2.11+ |
| `torch.fx._graph_pickler.GraphPickler` | 2.11+ |
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import fx
from torch._guards import TracingContext
from torch._inductor.output_code import OutputCode
from torch._subclasses import FakeTensorMode
from torch.fx._graph_pickler import GraphPickler, Options
from torch.fx.experimental.symbolic_shapes import ShapeEnv

KEPT = frozenset(
    {"val", "desc", "stack_trace", "original_aten", "partitioner_tag", "custom"}
    | {"user_visible_output_idxs"}
)
"""What is packed of a node's `meta`."""


class KeptCode(OutputCode):
    """A compiled graph that AOT Autograd can pickle: recompiled from `remake` on loading.

    Pickled are the instructions alone; a copy from another process follows them when AOT Autograd
    has loaded it.

    Args:
        run: The compiled graph: list in, sequence out.
        remake: Makes such a function anew; can be pickled.
    """

    def __init__(self, run: Callable[[list[Any]], Any], remake: Callable[[], Any]):
        super().__init__()
        self._boxed_call = True  # of the object: torch copies its attributes
        self._run: Callable[[list[Any]], Any] | None = run
        self._remake = remake

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """Runs the compiled graph; clears the list of inputs."""
        assert self._run is not None
        return self._run(inputs)  # type: ignore[arg-type]

    def prepare_for_serialization(self) -> None:
        """Drops the compiled function, on the copy that torch pickles."""
        self._run = None

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """Recompiles the graph, on a copy that torch has loaded."""
        if self._run is None:
            self._run = self._remake()

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Ignores Inductor's kernels, which this code does not use."""


def pack(gm: fx.GraphModule, kept: Collection[str] = KEPT) -> bytes:
    """Pickles a functional graph with its fake tensors; symbolic sizes are allowed.

    Args:
        gm: The graph.
        kept: Which keys of its nodes' `meta`.
    """
    return GraphPickler.dumps(gm, Options(None, kept.__contains__))


def unpack(data: bytes) -> fx.GraphModule:
    """Unpickles a graph from `pack`, in torch's current fake mode; trusted data only."""
    gm = GraphPickler.loads(data, mode_of_compilation())
    assert isinstance(gm, fx.GraphModule)
    gm.recompile()
    return gm


def mode_of_compilation() -> FakeTensorMode:
    """Returns the fake mode of torch's current compilation, or a new one."""
    context = TracingContext.try_get()
    mode = context.fake_mode if context is not None else None
    return mode or FakeTensorMode(shape_env=ShapeEnv())
