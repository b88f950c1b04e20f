"""Functional graphs as AOT Autograd calls them, and as torch keeps them for later processes.

Kept is the functional graph with what is needed to compile it again; the executables themselves are
in the backend's disk cache, so that compiling again is mostly loading (see docs/capture.md).
"""

import logging
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from dynamo_backends import _torch_private as private
from dynamo_backends.aot.updates import wrap_with_input_writes
from dynamo_backends.interface.errors import DoubleBackwardError, SaveError
from dynamo_backends.interface.report import Kind

_NO_DOUBLE_BACKWARD = (
    "a compiled graph does not support double backward: torch.compile makes one forward and one "
    "backward graph, and the backward graph cannot be differentiated. Run code that is "
    "differentiated twice (a gradient penalty, a Hessian-vector product, torch.autograd.grad(..., "
    "create_graph=True)) in eager: call the original module there, or decorate that function with "
    "torch.compiler.disable. Other code can stay compiled."
)


def refuse_double_backward() -> None:
    """Makes differentiating the running backward's results raise `DoubleBackwardError`."""
    node = private.running_backward_node()
    if node is None:
        return

    def watch(gradients: Sequence[Tensor | None], _: Any) -> None:
        handle.remove()
        for made in {g.grad_fn for g in gradients if g is not None and g.grad_fn is not None}:
            made.register_prehook(_refuse)

    handle = node.register_hook(watch)


def _refuse(_: Sequence[Tensor | None]) -> NoReturn:
    raise DoubleBackwardError(_NO_DOUBLE_BACKWARD)


GraphCompiler = Callable[[fx.GraphModule, Kind, frozenset[int]], Callable[[list[Any]], Any]]
"""Makes a boxed callable (list in, sequence out) of a functional graph, given its kind and which of
Dynamo's inputs are parameters and buffers."""


def compile_boxed(
    compile_graph: GraphCompiler, gm: fx.GraphModule, kind: Kind, static: frozenset[int]
) -> Callable[[list[Any]], Sequence[Any]]:
    """Compiles a graph, which then writes to the inputs that it updates (see `updates`).

    A backward graph refuses to be differentiated.

    Args:
        compile_graph: The compiler.
        gm: The graph.
        kind: Which of AOT Autograd's graphs it is.
        static: Which of Dynamo's inputs are parameters and buffers.
    """
    with torch.no_grad():
        run = wrap_with_input_writes(compile_graph(gm, kind, static), gm.graph)

    def boxed(args: list[Any]) -> Sequence[Any]:
        return run(args)

    def boxed_backward(args: list[Any]) -> Sequence[Any]:
        refuse_double_backward()
        return boxed(args)

    called = boxed_backward if kind == "backward" else boxed
    called._boxed_call = True  # type: ignore[attr-defined]
    return called


log = logging.getLogger("dynamo_backends")


def pickled_if_kept(compile_graph: GraphCompiler, complete: bool) -> bytes | None:
    """Pickles the graph compiler if torch caches the result; returns None otherwise.

    Torch keeps with `torch._dynamo.config.caching_precompile`, and in `aot_compile`.

    Args:
        compile_graph: The compiler.
        complete: Whether Dynamo gets what AOT Autograd makes, with nothing around it.

    Raises:
        SaveError: In `aot_compile`, if it cannot be kept.
    """
    if not private.aot_cache_is_enabled():
        return None
    reason = "an input is an instance of a Tensor subclass"
    if complete:
        try:
            return pickle.dumps(compile_graph)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            reason = f"the backend cannot be pickled ({error})"
    if private.must_be_serializable():
        raise SaveError(f"this graph cannot be saved to a file: {reason}")
    log.debug("a graph will be captured again in other processes: %s", reason)
    return None


@dataclass(frozen=True)
class GraphRecompiler:
    """Compiles a cached functional graph again in a later process; picklable.

    Attributes:
        compile_graph: The compiler; it has been pickled before.
        graph: The packed graph, or why it cannot be packed.
        kind: Which of AOT Autograd's graphs it is.
        static: Which of Dynamo's inputs are parameters and buffers.
    """

    compile_graph: GraphCompiler
    graph: bytes | Exception
    kind: Kind
    static: frozenset[int]

    def __call__(self) -> Callable[[list[Any]], Any]:
        """Compiles the graph again."""
        from dynamo_backends._torch_private.precompile import unpack

        assert isinstance(self.graph, bytes)
        return compile_boxed(self.compile_graph, unpack(self.graph), self.kind, self.static)

    def __getstate__(self) -> dict[str, Any]:
        """Returns what is pickled.

        Raises:
            PicklingError: The graph cannot be packed.
        """
        if isinstance(self.graph, Exception):
            raise pickle.PicklingError(str(self.graph)) from self.graph
        return self.__dict__


def compile_cacheable(
    compile_graph: GraphCompiler, gm: fx.GraphModule, kind: Kind, static: frozenset[int]
) -> Callable[[list[Any]], Any]:
    """Compiles as `compile_boxed` does and returns code that AOT Autograd can cache."""
    from dynamo_backends._torch_private.precompile import KeptCode, pack

    packed: bytes | Exception
    try:
        packed = pack(gm)
    except Exception as error:  # whatever a target or a constant answers to pickling
        packed = error
    run = compile_boxed(compile_graph, gm, kind, static)
    return KeptCode(run, GraphRecompiler(compile_graph, packed, kind, static))
