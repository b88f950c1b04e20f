"""The options of backends that can be run as CUDA graphs."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface.executable import Executable
from dynamo_backends.interface.options import Limits, Options


@dataclass(frozen=True)
class CudaGraphOptions(Options):
    """Declares that a backend's executables can be captured: a backend's options extend this class.

    That is all a backend has to do. It promises that its executables launch their work on torch's
    current stream, take their memory from torch, and do not wait for the device.

    Attributes:
        cudagraphs: Record what a compiled block launches, once for each set of shapes, and launch
            all of it at once from then on.
        cudagraph_outputs: "fresh" gives every call results of its own; "reused" returns the
            graph's own memory, which the next call of the same graph overwrites.
        cudagraph_warmup: How many calls run before the one that is recorded, at least 1: in their
            first call libraries initialise themselves, which cannot be recorded.
    """

    cudagraphs: bool = False
    cudagraph_outputs: Literal["fresh", "reused"] = "fresh"
    cudagraph_warmup: int = 2

    LIMITS: ClassVar[Limits] = {"cudagraph_warmup": (1, None)}

    @property
    def numbers_with_tensors(self) -> bool:
        """See `Options.numbers_with_tensors`: those on the host would be part of the graph."""
        return self.cudagraphs

    def check(self, graph: Graph, backend: str) -> None:
        """See `Options.check`: CUDA graphs need tensors on a CUDA device."""
        if self.cudagraphs:
            from dynamo_backends.cudagraphs.wrapper import require_device

            require_device(graph, backend)

    def wrapped(self, executable: Executable, graph: Graph, backend: str) -> Executable:
        """See `Options.wrapped`: it is recorded as a CUDA graph if that is asked for."""
        if not self.cudagraphs:
            return executable
        from dynamo_backends.cudagraphs.wrapper import CapturedExecutable

        return CapturedExecutable(executable, graph, self, backend)
