"""Compiled steps: run once, they update their inputs in place and hand over the rest."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from dynamo_backends.aot.step.program.online_comparison import OnlineComparison
from dynamo_backends.graph.aliasing import root
from dynamo_backends.graph.graph import Graph
from dynamo_backends.interface.report import GraphReport
from dynamo_backends.runtime.atomic import write


class StepProgram(ABC):
    """A compiled graph of the kind "step".

    Attributes:
        launches: How many steps it has launched. Copying results to where they belong does not
            count.
        from_disk: Whether it was loaded instead of compiled.
        prefers_eager: Whether the function itself is to take the steps from now on, in eager.
        comparison: While it is open whether that is faster: whose turn it is.
    """

    launches: int = 0
    from_disk: bool = False
    prefers_eager: bool = False
    comparison: OnlineComparison | None = None

    @abstractmethod
    def __call__(self, inputs: Sequence[Tensor], taken: list[Any]) -> None:
        """Runs one step.

        Args:
            inputs: One per input of the graph. Those with `Input.updated_by` get their new
                contents, all of them or, if it raises, all or none.
            taken: Gets one element, for `outputs`, if the new contents are there, also if this
                raises afterwards.
        """

    @abstractmethod
    def outputs(self, taken: list[Any]) -> list[Tensor]:
        """Returns the graph's other outputs; may be called again.

        Args:
            taken: As `__call__` left it.
        """

    def report_to(self, report: GraphReport) -> None:  # noqa: B027 - has a default
        """Gets the report of its graph, to which a program that learns later may add."""

    def dump(self) -> dict[str, bytes] | None:
        """Returns what must be kept on disk to load it in another process; None: cannot be."""
        return None


class CopyingProgram(StepProgram):
    """A functional program whose results are copied to where they belong, all in one call.

    Args:
        graph: The graph.
        run: From its inputs to all its outputs.
    """

    def __init__(self, graph: Graph, run: Callable[[list[Tensor]], Sequence[Any]]):
        self._run = run
        self._updated = [i for i, x in enumerate(graph.inputs) if x.updated_by is not None]
        self._borrowed = [i for i, x in enumerate(graph.outputs) if is_borrowed(x)]

    def __call__(self, inputs: Sequence[Tensor], taken: list[Any]) -> None:
        """See `StepProgram.__call__`."""
        count = len(self._updated)
        # Not torch.no_grad(), which a signal at the wrong moment would leave on.
        apart = [x.detach() for x in inputs]
        self.launches += 1
        results = list(self._run(list(apart)))  # some programs empty the list
        for i in self._borrowed:
            results[i] = results[i].clone()
        write([apart[i] for i in self._updated], results[:count], taken, results[count:])

    def outputs(self, taken: list[Any]) -> list[Tensor]:
        """See `StepProgram.outputs`."""
        results: list[Tensor] = taken[0]
        return results


def is_borrowed(output: Any) -> bool:
    """Whether an output of a graph shares memory with an input, which a step may overwrite."""
    return isinstance(output, fx.Node) and root(output).op == "placeholder"
