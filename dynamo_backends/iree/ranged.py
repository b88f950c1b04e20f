"""Runs one IREE program on inputs of all sizes of a range."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from dynamo_backends.graph.graph import Graph
from dynamo_backends.graph.layouts import aligned
from dynamo_backends.graph.sizes import opened
from dynamo_backends.interface.errors import CompileError
from dynamo_backends.interface.executable import Bound
from dynamo_backends.iree.lowering import ENTRY, IreeInputMap
from dynamo_backends.iree.runtime import IreeExecutable, range_of, separate
from dynamo_backends.iree.session import Device
from dynamo_backends.runtime.ranged import RangedLayout


class RangedIreeExecutable(IreeExecutable):
    """A compiled graph whose program has dynamic dimensions (see `IreeExecutable`).

    After the graph's inputs the program has those of the sizes among arguments (see
    `graph.sizes.opened`), as integers.

    Raises:
        CompileError: Sizes do not follow from the shapes of inputs.
    """

    serves_range = True

    def __init__(
        self, graph: Graph, program: bytes, wiring: IreeInputMap, device: Device, entry: str = ENTRY
    ):
        super().__init__(graph, program, wiring, device, entry)
        count = len(graph.inputs)
        arguments = [(at, i - count) for at, i in enumerate(wiring.arguments) if i >= count]
        further = opened(graph)[1]
        self._scalars = [at for at, _ in arguments]
        self._layout = RangedLayout(graph, [further[i] for _, i in arguments])

    def _bound(self, run: Callable[..., list[Tensor]], fixed: dict[int, Tensor]) -> Bound:
        device, layout, scalars = self._device, self._layout, self._scalars
        moving = [(place, at, layout.checks[at]) for place, at, _ in self._moving]
        wrap, count, of_bytes = device.wrap, len(layout.outputs), self._bytes
        views: list[Any] = [None] * (len(fixed) + len(moving) + len(scalars))
        for place, tensor in fixed.items():
            views[place] = wrap(tensor)
        owned = [range_of(t) for t in fixed.values()]

        def bound(activations: list[Tensor]) -> list[Tensor]:
            device.check_process()
            arguments, taken, numbers = views.copy(), owned.copy(), layout.numbers(activations)
            for place, at, check in moving:
                tensor = aligned(check(activations[at]))
                arguments[place] = wrap(tensor)
                taken.append(range_of(tensor))
            for place, number in zip(scalars, numbers, strict=False):
                arguments[place] = number
            results = separate(run(arguments, count), taken)
            for i, dtype in of_bytes:
                results[i] = results[i].view(dtype)
            layout.require_shapes(results, numbers, "IREE")
            return layout.export(results, numbers)

        return bound


def load(parts: Mapping[str, bytes], graph: Graph, device: Device) -> IreeExecutable:
    """Recreates an executable from `IreeExecutable.dump`.

    Raises:
        CompileError: The parts are incomplete, or IREE refuses them.
    """
    try:
        arguments, parameters, ranged = json.loads(parts["wiring"])
        pairs = tuple((int(i), str(name)) for i, name in parameters)
        wiring = IreeInputMap(tuple(arguments), pairs)
        return kind(ranged)(graph, parts["program"], wiring, device)
    except Exception as error:
        raise CompileError(f"the cached IREE program cannot be used: {error}") from error


def kind(ranged: bool) -> type[IreeExecutable]:
    """Of executables: for a range, or for the sizes of one call."""
    return RangedIreeExecutable if ranged else IreeExecutable
