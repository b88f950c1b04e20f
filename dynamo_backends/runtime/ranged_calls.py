"""Calls programs with dynamic sizes: their arguments, results and strides."""

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import DynamicInputConverter, DynamicOutputConverter
from dynamo_backends.graph.symbolic_sizes import (
    SIZES,
    SizeReader,
    collect_varying_sizes,
    has_size_expressions,
    sizes_of,
    strides_of,
    with_sizes_as_inputs,
)
from dynamo_backends.interface.errors import CompileError, LoweringError
from dynamo_backends.interface.executable import Bound, Executable
from dynamo_backends.runtime.results import restride

log = logging.getLogger("dynamo_backends")

Made = TypeVar("Made", bound=Executable)


def make_for_range(graph: Graph, make: Callable[[bool], Made]) -> Made:
    """Makes an executable for all sizes, or for one set if that fails.

    Args:
        graph: For concrete shapes.
        make: Makes it; the argument says whether it is to serve a range.
    """
    if has_size_expressions(graph.module.graph):
        try:
            return make(True)
        except (LoweringError, CompileError) as error:
            # A lowering has to know a size: every shape gets a program of its own.
            log.info("one program cannot serve a range of shapes: %s", error)
    return make(False)


def require_nonempty(
    graph: Graph, keeps_elements: Callable[[fx.Node], bool] = lambda node: False
) -> None:
    """Raises `CompileError` if a tensor may be empty for some sizes of the range.

    Args:
        graph: For concrete shapes; from one with symbolic shapes.
        keeps_elements: Whether the result of a call has elements if its inputs have; such calls are
            not asked about.
    """
    for node in graph.module.graph.nodes:
        if keeps_elements(node):
            continue
        if any(size.lower < 1 for size in collect_varying_sizes(node.meta.get(SIZES))):
            raise CompileError(f"{node.name!r} may have no elements")


class RangedOutput:
    """An output with dynamic sizes: how to allocate and restride it.

    Args:
        node: In the graph.
        start: Number of values that are computed before this output's.

    Attributes:
        export: Gives it the strides that torch promises.
        wanted: The sizes, and if it is copied the strides, that are computed at each call.
        shape: Where the sizes are among the numbers that are computed.
        strides: Where the strides are.

    Raises:
        CompileError: Its shape does not follow from those of the graph's inputs.
    """

    def __init__(self, node: fx.Node, start: int):
        value: Tensor = node.meta["val"]
        self.dtype = value.dtype
        self.export = DynamicOutputConverter(value)
        known = _known(node, sizes_of(node))
        self.wanted = known + (_known(node, strides_of(node)) if self.export.copies else [])
        self.shape = slice(start, start + value.ndim)
        self.strides = slice(start + value.ndim, start + len(self.wanted))

    def allocate(self, shape: Sequence[int], device: torch.device | None = None) -> Tensor:
        """Allocates memory for one result of a given shape.

        Args:
            shape: Shape of the output.
            device: Where; None: in the memory of the CPU.
        """
        return torch.empty(self.export.dense_shape(shape), dtype=self.dtype, device=device)


class RangedLayout:
    """The inputs and outputs of a dynamic-shape program, resolved at each call.

    Args:
        graph: For concrete shapes; from one with symbolic shapes.
        arguments: Sizes that the program is given besides the graph's inputs.

    Attributes:
        checks: What makes of each activation a tensor that the program takes.
        outputs: What it returns.
        numbers: From activations to the numbers of a call: the arguments', then the outputs'.

    Raises:
        CompileError: Sizes do not follow from the shapes of the graph's inputs.
    """

    def __init__(self, graph: Graph, arguments: Sequence[int] = ()):
        places = [graph.placeholders[i] for i in graph.activations]
        self.checks = [DynamicInputConverter(p.meta["val"], sizes_of(p)) for p in places]
        self.outputs: list[RangedOutput] = []
        wanted = list(arguments)
        for node in graph.outputs:
            self.outputs.append(RangedOutput(node, len(wanted)))
            wanted += self.outputs[-1].wanted
        self.numbers = SizeReader(places, wanted)

    def allocate_outputs(
        self, numbers: Sequence[int], device: torch.device | None = None
    ) -> list[Tensor]:
        """Allocates memory for all results of a call.

        Args:
            numbers: Numbers of the call.
            device: Where; None: in the memory of the CPU.
        """
        return [y.allocate(numbers[y.shape], device) for y in self.outputs]

    def require_shapes(self, results: Sequence[Tensor], numbers: Sequence[int], who: str) -> None:
        """Raises `RuntimeError` if results have other shapes than torch computed.

        Args:
            results: Results of a call.
            numbers: Numbers of the call.
            who: Made them, for the message.
        """
        for y, result in zip(self.outputs, results, strict=True):
            shape = y.export.dense_shape(numbers[y.shape])
            if result.shape != shape:
                found = list(result.shape)
                raise RuntimeError(f"{who}'s program gives {found} instead of {list(shape)}")

    def export_results(self, results: Sequence[Tensor], numbers: Sequence[int]) -> list[Tensor]:
        """Returns results with the strides that eager gives them.

        Args:
            results: From the program.
            numbers: Numbers of the call.
        """
        return [
            y.export(result, numbers[y.shape], numbers[y.strides])
            for y, result in zip(self.outputs, results, strict=True)
        ]


class RangedCalls:
    """Calls a function with the dynamic sizes appended to its inputs.

    Args:
        graph: For concrete shapes; from one with symbolic shapes.

    Attributes:
        graph: What the function computes.

    Raises:
        CompileError: Sizes do not follow from the shapes of the graph's inputs.
    """

    def __init__(self, graph: Graph):
        self.graph, sizes = with_sizes_as_inputs(graph)
        strides = [_known(node, strides_of(node)) for node in graph.outputs]
        places = [graph.placeholders[i] for i in graph.activations]
        self._count = len(sizes)
        self._read = SizeReader(places, [*sizes, *(s for each in strides for s in each)])
        ends = [self._count]
        for each in strides:
            ends.append(ends[-1] + len(each))
        self._strides = [slice(*pair) for pair in itertools.pairwise(ends)]

    def wrap_function(
        self, run: Callable[..., Sequence[Any]], inputs: Callable[..., Any] = list
    ) -> Bound:
        """Wraps a function to compute sizes of each call and eager's strides.

        Args:
            run: The function.
            inputs: From the activations to all inputs that `run` takes besides sizes.
        """
        read, count, strides = self._read, self._count, self._strides

        def bound(activations: Sequence[Tensor]) -> list[Tensor]:
            numbers = read(activations)
            results = run(*inputs(activations), *numbers[:count])
            pairs = [(r, tuple(numbers[s])) for r, s in zip(results, strides, strict=True)]
            return [r if r.stride() == s else restride(r, s) for r, s in pairs]

        return bound


def _known(node: fx.Node, numbers: Sequence[int | None]) -> list[int]:
    known = [number for number in numbers if number is not None]
    if len(known) != len(numbers):
        raise CompileError(f"the sizes of the output {node.name!r} are not known")
    return known
