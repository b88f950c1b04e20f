"""Compiled graphs that torch keeps for later processes, which then neither capture nor trace.

Kept is the functional graph with what is needed to compile it again; the executables themselves are
in the backend's disk cache, so that compiling again is mostly loading (see docs/capture.md).
"""

import logging
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from dynamo_backends import _torch_private as private
from dynamo_backends.aot.boxed import GraphCompiler, compile_boxed
from dynamo_backends.interface.errors import SaveError
from dynamo_backends.interface.report import Kind

log = logging.getLogger("dynamo_backends")


def pickled_if_kept(compile_graph: GraphCompiler, complete: bool) -> bytes | None:
    """Returns the compiler as bytes; None: torch keeps nothing, or no other process could use it.

    Torch keeps with `torch._dynamo.config.caching_precompile`, and in `aot_compile`.

    Args:
        compile_graph: The compiler.
        complete: Whether Dynamo gets what AOT Autograd makes, with nothing around it.

    Raises:
        SaveError: In `aot_compile`, if it cannot be kept.
    """
    if not private.keeps_compiled():
        return None
    reason = "an input is of a subclass of Tensor"
    if complete:
        try:
            return pickle.dumps(compile_graph)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            reason = f"its compiler cannot be pickled ({error})"
    if private.must_keep_compiled():
        raise SaveError(f"this graph cannot be saved to a file: {reason}")
    log.debug("a graph will be captured anew in other processes: %s", reason)
    return None


@dataclass(frozen=True)
class Remaking:
    """How a later process compiles a functional graph again.

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
        """Compiles it."""
        from dynamo_backends._torch_private.precompile import unpack

        assert isinstance(self.graph, bytes)
        return compile_boxed(self.compile_graph, unpack(self.graph), self.kind, self.static)

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled.

        Raises:
            PicklingError: The graph cannot be packed.
        """
        if isinstance(self.graph, Exception):
            raise pickle.PicklingError(str(self.graph)) from self.graph
        return self.__dict__


def compile_kept(
    compile_graph: GraphCompiler, gm: fx.GraphModule, kind: Kind, static: frozenset[int]
) -> Callable[[list[Any]], Any]:
    """As `compile_boxed`, in the form that AOT Autograd can keep."""
    from dynamo_backends._torch_private.precompile import KeptCode, pack

    packed: bytes | Exception
    try:
        packed = pack(gm)
    except Exception as error:  # whatever a target or a constant answers to pickling
        packed = error
    run = compile_boxed(compile_graph, gm, kind, static)
    return KeptCode(run, Remaking(compile_graph, packed, kind, static))
